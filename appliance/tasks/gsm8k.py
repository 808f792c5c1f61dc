"""GSM8K: grade-school word problems. Rows have `question` and `answer`; the number after the last `####` is the truth.

The prompt asks for the answer after `####`; the reward reads the last `#### <number>` of the response and nothing else.
"""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal
from pathlib import Path

from appliance.errors import RecipeError
from appliance.tasks.problem import Problem, Splits

HUB_NAME = "openai/gsm8k"
INSTRUCTION = ' Let\'s think step by step and output the final answer after "####".'
_MAX_PROBLEMS = 20
_HINT = 'each line is a JSON object with `question` and `answer`, both text, the number after "####" in `answer`'
_FINAL = re.compile(r"####[ \t]*(-?\$?-?(?:\d[\d,]*(?:\.\d+)?|\.\d+))(?!\.?\w)")


def final_number(text: str) -> Decimal | None:
    """The number after the last `####` that has one; commas and a dollar sign are dropped. None when there is none."""
    found = _FINAL.findall(text)
    return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None


def score(*, response: str, truth: str) -> float:
    """1.0 when the number after the last `####` of the response equals the truth, else 0.0."""
    number = final_number(response)
    return float(number is not None and number == Decimal(truth))


def problem(question: str, answer: str) -> Problem:
    """Raises ValueError when the answer has no number after `####`."""
    number = final_number(answer)
    if number is None:
        raise ValueError(f"no number after #### in {answer!r}")
    return Problem(prompt=question.strip() + INSTRUCTION, truth=str(number))


def check_rows(path: str | Path) -> list[tuple[str, str]]:
    """(message, hint) for every problem of a data file, each `file:line: message`; after 20 of them their number."""
    return _read(path)[1]


def read_problems(path: str | Path) -> list[Problem]:
    """All problems of a file. Raises RecipeError with what `check_rows` finds."""
    problems, found = _read(path)
    if found:
        raise RecipeError(found)
    return problems


def _read(path: str | Path) -> tuple[list[Problem], list[tuple[str, str]]]:
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], [(f"{path}: no such file", "give the path of a JSON-lines file")]
    except OSError as error:
        return [], [(f"{path}: cannot be read: {error.strerror}", "give the path of a readable JSON-lines file")]
    problems, found = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        made = _parse(line)
        if isinstance(made, Problem):
            problems.append(made)
        else:
            found.append((f"{path}:{number}: {made}", _HINT))
    if not problems and not found:
        found = [(f"{path}: the file has no rows", _HINT)]
    if len(found) > _MAX_PROBLEMS:
        more = len(found) - _MAX_PROBLEMS
        found = [*found[:_MAX_PROBLEMS], (f"{path}: and {more} more", "")]
    return problems, found


def _parse(line: bytes) -> Problem | str:
    """The problem of a line, or what is wrong with it."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return "not UTF-8 text"
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at column {error.colno}"
    except RecursionError:
        return "not JSON: nested too deeply"
    if not isinstance(row, dict):
        return "not a JSON object"
    for field in ("question", "answer"):
        if field not in row:
            return f"the field `{field}` is missing"
        if not isinstance(row[field], str) or not row[field].strip():
            return f"the field `{field}` is not text, or empty"
    if final_number(row["answer"]) is None:
        return "the field `answer` has no number after `####`"
    return problem(row["question"], row["answer"])


def splits(*, train_file: str, val_file: str, seed: int, train_size: int, val_size: int) -> Splits:
    """Training and validation problems, from files or, without a train_file, from the hub. A size of 0 takes all.

    Without a val_file the seed holds out val_size problems of the train_file.
    Raises RecipeError for bad rows of both files at once, for sizes that leave nothing, and when the hub is away.
    """
    if not train_file:
        train, val = _from_hub("train"), _from_hub("test")
    elif val_file:
        found = check_rows(train_file) + check_rows(val_file)
        if found:
            raise RecipeError(found)
        train, val = read_problems(train_file), read_problems(val_file)
    else:
        train, val = _hold_out(read_problems(train_file), path=train_file, seed=seed, val_size=val_size)
    random.Random(f"{seed}-train").shuffle(train)
    return Splits(train=train[: train_size or None], val=val[: val_size or None])


def _hold_out(problems: list[Problem], *, path: str, seed: int, val_size: int) -> tuple[list[Problem], list[Problem]]:
    """(train, val): val_size problems drawn by the seed; a problem that occurs twice goes to one side only."""
    distinct = sorted(set(problems), key=lambda each: each.prompt)
    if not 0 < val_size < len(distinct):
        message = f"task.val_size: {val_size} of the {len(distinct)} problems in {path} leaves none for one side"
        raise RecipeError([(message, f"use 1 to {max(1, len(distinct) - 1)}, or give task.val_file")])
    random.Random(f"{seed}-hold-out").shuffle(distinct)
    return distinct[val_size:], distinct[:val_size]


def _from_hub(split: str) -> list[Problem]:
    import datasets  # loads pandas and pyarrow: only when the hub is asked

    try:
        rows = datasets.load_dataset(HUB_NAME, "main", split=split)
    except OSError as error:  # no network, no such data set, or offline mode: all of them are OSError
        message = f"task.train_file: none is given and {HUB_NAME} cannot be had from the hub: {_first_line(error)}"
        raise RecipeError([(message, "give task.train_file, a JSON-lines file")]) from error
    return [problem(row["question"], row["answer"]) for row in rows]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

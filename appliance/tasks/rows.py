"""Data files as problems: JSON lines or parquet, row by row, every bad row named, repeated problems once.

A row is what a task's own data set has (its `parse` knows), or verl's schema, in which `appliance data` writes:
`prompt`, one chat message of the user, and `reward_model.ground_truth`. Imports pyarrow, for parquet only.
"""

from __future__ import annotations

import errno
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.errors import RecipeError
from appliance.tasks.problem import Problem

PARQUET = ".parquet"
MAX_PROBLEMS = 20
MAX_LINE = 16 << 20  # bytes: a line is held in memory, and what has no line ends would be held whole
ROWS_AT_A_TIME = 8192  # of a parquet file: DAPO-Math-17k has 1.8 million

Row = dict[str, Any]
Parse = Callable[[Row], Problem | str]  # the problem of a row, or what is wrong with it


@dataclass(frozen=True)
class Found:
    """What a file holds. problems: each prompt once, in the order of the file.  rows: all there are.

    conflicting: rows whose prompt came before with another truth; the first one counts.
    faults: (message, hint) with `file:line`, after 20 of them their number.
    """

    problems: list[Problem]
    rows: int
    conflicting: int
    faults: list[tuple[str, str]]

    @property
    def repeated(self) -> int:
        return self.rows - len(self.problems)


def read_file(path: str | Path, *, parse: Parse, hint: str, most_rows: int | None = None) -> Found:
    """The problems of a file. hint: what a row looks like.  most_rows: look at no more. Never raises for the file."""
    try:
        if Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir()):
            raise OSError(errno.EINVAL, "not a regular file")  # a pipe or a device: its reading may never end
        return read_rows(_rows(Path(path)), source=str(path), parse=parse, hint=hint, most_rows=most_rows)
    except FileNotFoundError:
        fault = (f"{path}: no such file", f"give the path of a {_kind(path)} file")
    except OSError as error:
        fault = (
            f"{path}: cannot be read: {error.strerror or error}",
            f"give the path of a readable {_kind(path)} file",
        )
    except ValueError as error:  # pyarrow's, for what is no parquet
        fault = (f"{path}: not a parquet file: {_first_line(error)}", hint)
    return Found(problems=[], rows=0, conflicting=0, faults=[fault])


def read_rows(
    rows: Iterable[tuple[int, Row | str]], *, source: str, parse: Parse, hint: str, most_rows: int | None = None
) -> Found:
    """The problems of rows, each with its place. source: what a fault is of, a file or a data set of the hub."""
    truths: dict[str, str] = {}
    faults: list[tuple[str, str]] = []
    seen = bad = conflicting = 0
    for place, row in itertools.islice(rows, most_rows):
        seen += 1
        made = row if isinstance(row, str) else _problem(row, parse=parse)
        if isinstance(made, str):
            bad += 1
            if bad <= MAX_PROBLEMS:
                faults.append((f"{source}:{place}: {made}", hint))
        elif truths.setdefault(made.prompt, made.truth) != made.truth:
            conflicting += 1
    if not truths and not faults:
        faults = [(f"{source}: the file has no rows", hint)]
    if bad > MAX_PROBLEMS:
        faults.append((f"{source}: and {bad - MAX_PROBLEMS} more", ""))
    problems = [Problem(prompt, truth) for prompt, truth in truths.items()]
    return Found(problems=problems, rows=seen, conflicting=conflicting, faults=faults)


def read_files(*paths: str, parse: Parse, hint: str) -> list[Found]:
    """Each file's. Raises RecipeError with the faults of all of them at once."""
    found = [read_file(path, parse=parse, hint=hint) for path in paths]
    faults = [fault for each in found for fault in each.faults]
    if faults:
        raise RecipeError(faults)
    return found


def _kind(path: str | Path) -> str:
    return "parquet" if str(path).endswith(PARQUET) else "JSON-lines"


def _rows(path: Path) -> Iterator[tuple[int, Row | str]]:
    """(line or row number, the row or what is wrong with it)."""
    if path.suffix == PARQUET:
        yield from _parquet_rows(path)
        return
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), start=1):
            if len(line) > MAX_LINE:
                yield number, f"a line of more than {MAX_LINE >> 20} MiB: the rest of the file is not read"
                return
            if line.strip():
                yield number, _json_row(line.rstrip(b"\n"))


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    with path.open("rb") as file:
        try:
            for batch in pq.ParquetFile(file).iter_batches(batch_size=ROWS_AT_A_TIME):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
        except pa.ArrowException as error:  # not all of them are a ValueError
            raise ValueError(str(error)) from error


def _json_row(line: bytes) -> Row | str:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return "not UTF-8 text"
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at column {error.colno}"
    except RecursionError:
        return "not JSON: nested too deeply"
    except ValueError:  # the interpreter's limit
        return "not JSON: a number of thousands of digits"
    return row if isinstance(row, dict) else "not a JSON object"


def _problem(row: Row, *, parse: Parse) -> Problem | str:
    made = _of_verl(row) if "prompt" in row and "reward_model" in row else parse(row)
    if isinstance(made, Problem) and not (_is_unicode(made.prompt) and _is_unicode(made.truth)):
        return "half a character, such as `\\ud800`, which no tokenizer can read"
    return made


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= each <= "\udfff" for each in text)


def _of_verl(row: Row) -> Problem | str:
    """A row in verl's schema."""
    messages, reward = row["prompt"], row["reward_model"]
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        return "the field `prompt` is not a list of messages"
    said = [each.get("content") for each in messages if each.get("role") == "user"]
    if len(said) != 1 or len(messages) != 1 or not isinstance(said[0], str) or not said[0].strip():
        return "the field `prompt` is not one message of the user"
    truth = reward.get("ground_truth") if isinstance(reward, dict) else None
    if not isinstance(truth, str) or not truth.strip():
        return "the field `reward_model` has no `ground_truth`, or it is not text"
    return Problem(prompt=said[0], truth=truth.strip())


def text_fields(row: Row, *names: str) -> tuple[str, ...] | str:
    """The values of the fields, or what is wrong with the first bad one."""
    for name in names:
        if name not in row:
            return f"the field `{name}` is missing"
        if not isinstance(row[name], str) or not row[name].strip():
            return f"the field `{name}` is not text, or empty"
    return tuple(row[name] for name in names)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

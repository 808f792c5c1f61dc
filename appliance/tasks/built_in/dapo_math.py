"""DAPO-Math-17k to train on, AIME 2024 to validate: competition problems whose answer is a number or an expression.

The prompt asks for the answer on a last line after `Answer:`; the reward reads the last such line, and where there is
none the last `\\boxed{...}`. Text that differs is compared by math-verify, in sympy: only a worker of
trainer/rewards.py may call `score`.
"""

from __future__ import annotations

import re

from appliance.tasks.built_in.gsm8k import plain_numbers
from appliance.tasks.rows import Problem, Row, Source, text_fields
from appliance.tasks.task import DataFile, Task

TRAIN = DataFile("dapo-math-17k", "train", "BytedTsinghua-SIA/DAPO-Math-17k", "data/dapo-math-17k.parquet")
VAL = DataFile("aime-2024", "val", "BytedTsinghua-SIA/AIME-2024", "data/aime-2024.parquet")

# The words of DAPO-Math-17k's own prompts, for rows that have only a problem and an answer.
BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'

HINT = "each row has `problem` and `answer`, both text, or verl's `prompt` and `reward_model.ground_truth`"

PARSING_S = COMPARING_S = 5  # math-verify's own limits, whole seconds by its alarm
_LONGEST_ANSWER = 300  # characters; the longest answer of MATH-500 has 159
_INTEGER = re.compile(r"-?\d{1,18}")
_BLANKS = re.compile(r"(?<=\d)( ) *(?=\d)| ")  # one stays between two digits: 1 2 is not 12
_SIDE_BY_SIDE = re.compile(r"[-\d.,/]+(?: [-\d.,/]+)+")  # math-verify would make one number of them
_MIXED = re.compile(r"(?<![\w.,/^])(?<!\d )(\d{1,3}(?: \d{3})+|\d{1,9}) +([1-9]\d{0,8})/(\d{1,9})(?![\d^]|\.\d)")
_SPACE = r"[ \u00a0\u2009\u202f]"  # between thousands: a usual one, no-break, thin, or both
_GROUPED = re.compile(rf"(?<![\w.,])(?<!\d{_SPACE})\d{{1,3}}(?:{_SPACE}\d{{3}})+(?!\d|{_SPACE}\d|,\d{{3}}(?!\d))")
_ANSWER = re.compile(r"(?i)answer\s*:[ \t]*([^\n]+)")


def final_answer(response: str) -> str | None:
    """What follows the last `Answer:` on its line, else what the last `\\boxed{...}` holds, else None."""
    found = _ANSWER.findall(response)
    if found:
        return found[-1].strip().strip("*").strip()
    start = response.rfind("\\boxed{")
    return braced(response[start + len("\\boxed{") :]) if start >= 0 else None


def braced(text: str) -> str | None:
    """Up to the brace that closes one opened before the text; None when there is none."""
    depth = 1
    for index, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if not depth:
            return text[:index].strip()
    return None


def score(*, response: str, truth: str) -> float:
    """1.0 when the final answer equals the truth as text or, by math-verify, as mathematics; else 0.0. Uses
    signal.alarm: main thread only.  Raises what math-verify raises, its time-outs included."""
    answer = final_answer(response)
    return float(answer is not None and is_same(answer, truth=truth))


def is_same(answer: str, *, truth: str) -> bool:
    """As text or, by math-verify, as mathematics. Raises, and uses signals, as `score`."""
    if not 0 < len(answer) <= _LONGEST_ANSWER:
        return False
    answer, truth = (joined_numbers(plain_numbers(each)) for each in (answer, truth))
    given, wanted = _plain(answer), _plain(truth)
    if given == wanted:
        return True
    if _INTEGER.fullmatch(given) and _INTEGER.fullmatch(wanted):
        return int(given) == int(wanted)
    if any(map(_SIDE_BY_SIDE.fullmatch, (given, wanted))):
        return False
    return _equal(answer, truth=truth)


def joined_numbers(answer: str) -> str:
    """The answer with `1 1/2` as `3/2` where the fraction is a proper one, and thousands as in `12 345` joined."""
    return _GROUPED.sub(lambda found: re.sub(r"\D", "", found[0]), _MIXED.sub(_improper, answer))


def _improper(mixed: re.Match[str]) -> str:
    whole, over, under = int(mixed[1].replace(" ", "")), int(mixed[2]), int(mixed[3])
    return f"{whole * under + over}/{under}" if over < under else mixed[0]


def _plain(text: str) -> str:
    return _BLANKS.sub(r"\1", text.strip().strip("$").rstrip("."))


def _equal(answer: str, *, truth: str) -> bool:
    from math_verify import parse, verify

    gold, given = (parse(_marked(text), parsing_timeout=PARSING_S) for text in (truth, answer))
    return bool(gold and given) and verify(gold, given, timeout_seconds=COMPARING_S)


def _marked(text: str) -> str:
    """For math-verify, which looks for marked mathematics: a box holds one expression, whatever it looks like."""
    inner = text.strip().strip("$")
    return text if "$" in inner else f"\\boxed{{{inner}}}"


def import_verifier() -> None:
    """Load math-verify and sympy, and parse once: its grammar is built at the first use."""
    _equal("1", truth="2")


def parse_row(row: Row) -> Problem | str:
    """The problem of a row with `problem` and `answer`, or what is wrong with it. (verl's schema: `tasks.rows`.)"""
    fields = text_fields(row, "problem", "answer")
    return fields if isinstance(fields, str) else Problem(prompt=as_prompt(fields[0]), truth=fields[1].strip())


def as_prompt(problem: str) -> str:
    """A bare problem in the words of DAPO-Math-17k."""
    return problem if problem.startswith(BEFORE) else f"{BEFORE}{problem.strip()}{AFTER}"


TASK = Task(
    kind="dapo-math",
    score=score,
    answers=lambda truth: (f"Answer: {truth}", f"\\boxed{{{truth}}}"),
    describe="a competition problem; 1 for the right answer after the last `Answer:` or in `\\boxed{}`, else 0",
    source=Source(parse=parse_row, hint=HINT),
    checked_rows=20_000,  # a file may have millions; its preparation reads the rest
    import_reward=import_verifier,
    data_sets={"dapo-math-17k": (TRAIN,), "aime-2024": (VAL,)},
)

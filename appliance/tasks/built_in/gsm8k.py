"""GSM8K: grade-school word problems. Rows have `question` and `answer`; the number after the last `####` is the truth.

The prompt asks for the answer after `####`; the reward reads the last `#### <number>` of the response and nothing else.
"""

from __future__ import annotations

import re
from decimal import Decimal

from appliance.tasks.rows import Problem, Row, Source, text_fields
from appliance.tasks.task import DataFile, Task

HUB_NAME = "openai/gsm8k"
INSTRUCTION = ' Let\'s think step by step and output the final answer after "####".'
HINT = 'each line is a JSON object with `question` and `answer`, both text, the number after "####" in `answer`'
FINAL = re.compile(r"####[ \t]*((?:-\$?|\$-?)?(?:\d[\d,]*(?:\.\d+)?|\.\d+))(?!\.?\w)")
_RANGES_END = r"(?<![^\s(\[{>=:*#$])(?<!\d\s)"  # a dash behind anything else is one, as in `3–5` and `3 –5`
_MINUS = re.compile(rf"\u2212|{_RANGES_END}[\u2013\uff0d](?=\.?\d)")
_EXPONENT = re.compile(r"(?<![\w.,])(?:\d+(?:\.\d*)?|\.\d+)[eE][+-]?\d{1,3}(?!\.?\w)")


def plain_numbers(text: str) -> str:
    """The text with an ASCII minus, and `1e-05` as `0.00001`: exponents of up to three digits.

    A minus is U+2212, and an en dash or a full-width one directly before a digit where no range can end.
    """
    return _EXPONENT.sub(lambda found: f"{Decimal(found[0]):f}", _MINUS.sub("-", text))


def final_number(text: str) -> Decimal | None:
    """The number after the last `####` that has one; commas and a dollar sign are dropped. None when there is none."""
    found = FINAL.findall(plain_numbers(text))
    return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None


def score(*, response: str, truth: str) -> float:
    """1.0 when the number after the last `####` of the response equals the truth, else 0.0."""
    number = final_number(response)
    return float(number is not None and number == Decimal(truth))


def parse_row(row: Row) -> Problem | str:
    """The problem of a row of the data set, or what is wrong with it."""
    fields = text_fields(row, "question", "answer")
    if isinstance(fields, str):
        return fields
    question, answer = fields
    number = final_number(answer)
    if number is None:
        return "the field `answer` has no number after `####`"
    return Problem(prompt=question.strip() + INSTRUCTION, truth=f"{number:f}")


TASK = Task(
    kind="gsm8k",
    score=score,
    answers=lambda truth: (f"#### {truth}",),
    describe="a word problem; 1 for the right number after the last `####`, else 0",
    source=Source(parse=parse_row, hint=HINT),
    data_sets={
        "gsm8k": (
            DataFile("gsm8k-train", "train", HUB_NAME, "main/train-00000-of-00001.parquet"),
            DataFile("gsm8k-val", "val", HUB_NAME, "main/test-00000-of-00001.parquet"),
        )
    },
)

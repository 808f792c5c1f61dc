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


def final_number(text: str) -> Decimal | None:
    """The number after the last `####` that has one; commas and a dollar sign are dropped. None when there is none."""
    found = FINAL.findall(text)
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
    return Problem(prompt=question.strip() + INSTRUCTION, truth=str(number))


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

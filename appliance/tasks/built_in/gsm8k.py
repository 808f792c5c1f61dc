"""GSM8K: grade-school word problems. Rows have `question` and `answer`; the number after the last `####` is the truth.

The prompt asks for the answer after `####`; the reward reads what is behind the last `####` of the response and nothing
else.
"""

from __future__ import annotations

from decimal import Context, Decimal

from appliance.tasks.answers import answer_text, last_line, truth_alternatives
from appliance.tasks.maths.equality import is_same, single_value
from appliance.tasks.rows import Problem, Row, Source, text_fields
from appliance.tasks.task import DataFile, TaskDefinition

HUB_NAME = "openai/gsm8k"
INSTRUCTION = ' Let\'s think step by step and output the final answer after "####".'
HINT = 'each line is a JSON object with `question` and `answer`, both text, the number after "####" in `answer`'


_EXACTLY = Context(prec=400)  # as many digits as a number is read with


def final_number(text: str) -> Decimal | None:
    """Return the number after the last `####` that has one, its unit and currency dropped. None when there is none, or
    what is there is no single number."""
    line = last_line(text)
    value = single_value(line.inner) if line is not None else None
    return None if value is None else _EXACTLY.divide(Decimal(value.numerator), Decimal(value.denominator))


def score(*, response: str, truth: str) -> float:
    """Return 1.0 when the number after the last `####` of the response equals the truth, or one of its alternatives,
    else 0.0."""
    line = last_line(answer_text(response))
    if line is None or single_value(line.inner) is None:
        return 0.0
    return float(any(is_same(line.inner, truth=alternative) for alternative in truth_alternatives(truth)))


def parse_row(row: Row) -> Problem | str:
    """Make the problem of a row of the data set, or return what is wrong with it."""
    fields = text_fields(row, "question", "answer")
    if isinstance(fields, str):
        return fields
    question, answer = fields
    number = final_number(answer)
    if number is None:
        return "the field `answer` has no number after `####`"
    return Problem(prompt=question.strip() + INSTRUCTION, truth=f"{number:f}")


TASK = TaskDefinition(
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

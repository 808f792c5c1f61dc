"""DAPO-Math-17k to train on, AIME 2024 to validate: competition problems whose answer is a number or an expression.

The prompt asks for the answer on a last line after `Answer:`; the reward reads the last such line, and where there is
none the last `\\boxed{...}`. Text that differs is compared as `equality.py` does.
"""

from __future__ import annotations

from appliance.tasks.answers import (
    DEEPEST_MARK,
    answer_line,
    answer_text,
    is_corrected,
    is_part,
    last_box,
    truth_alternatives,
)
from appliance.tasks.graders import is_right
from appliance.tasks.maths.equality import prepare
from appliance.tasks.rows import Problem, Row, Source, text_fields
from appliance.tasks.task import DataFile, TaskDefinition

TRAIN = DataFile("dapo-math-17k", "train", "BytedTsinghua-SIA/DAPO-Math-17k", "data/dapo-math-17k.parquet")
VAL = DataFile("aime-2024", "val", "BytedTsinghua-SIA/AIME-2024", "data/aime-2024.parquet")

# The words of DAPO-Math-17k's own prompts, for rows that have only a problem and an answer.
BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'

HINT = "each row has `problem` and `answer`, both text, or verl's `prompt` and `reward_model.ground_truth`"


def final_answer(response: str) -> str | None:
    """Return what follows the last `Answer:` on its line, else what the last box contains, with the boxes that are
    parts of the same answer, else None."""
    answer, response = None, answer_text(response)
    for _ in range(DEEPEST_MARK):
        mark = answer_line(response) or last_box(response)
        if (
            mark is None
            or is_corrected(response, mark.end)
            or (answer is not None and is_part(mark.inner, whole=response))
        ):
            break
        answer = response = mark.inner
    return answer


def score(*, response: str, truth: str) -> float:
    """Return 1.0 when the final answer equals the truth, or one of its alternatives, as a careful person compares them;
    else 0.0."""
    answer = final_answer(response)
    return float(
        answer is not None and any(is_right(answer, truth=alternative) for alternative in truth_alternatives(truth))
    )


def parse_row(row: Row) -> Problem | str:
    """Make the problem of a row with `problem` and `answer`, or return what is wrong with it. (verl's schema:
    `tasks.rows`.)"""
    fields = text_fields(row, "problem", "answer")
    return fields if isinstance(fields, str) else Problem(prompt=as_prompt(fields[0]), truth=fields[1].strip())


def as_prompt(problem: str) -> str:
    """Put a bare problem into the words of DAPO-Math-17k."""
    return problem if problem.startswith(BEFORE) else f"{BEFORE}{problem.strip()}{AFTER}"


TASK = TaskDefinition(
    kind="dapo-math",
    score=score,
    answers=lambda truth: (f"Answer: {truth}", f"\\boxed{{{truth}}}"),
    describe="a competition problem; 1 for the right answer after the last `Answer:` or in `\\boxed{}`, else 0",
    source=Source(parse=parse_row, hint=HINT),
    checked_rows=20_000,  # a file may have millions; its preparation reads the rest
    import_reward=prepare,
    data_sets={"dapo-math-17k": (TRAIN,), "aime-2024": (VAL,)},
)

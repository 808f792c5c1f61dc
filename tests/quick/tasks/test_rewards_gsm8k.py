"""Rows of GSM8K through `kind: own` with `math` have the grades of `kind: gsm8k`, but where `math` reads more.

The rows are the first 500 of GSM8K's training split (openai/grade-school-math, MIT), each with several answers, and
others made as they are.
"""

from __future__ import annotations

import json
import lzma
import random
import sys
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from plans import make_own_task

from appliance.tasks import own_task
from appliance.tasks.built_in import gsm8k
from appliance.tasks.graders import math
from appliance.tasks.rows import Row
from appliance.tasks.task import Response

FILE = Path(__file__).with_name("gsm8k") / "train-500.jsonl.xz"
ANSWERS, ODD = 1000, 400
GROUPED = "{:,}".format

# The same grade by both: each from (solution, its number), where the number is right, or one of another problem.
SAME: dict[str, Callable[[str, str], str]] = {
    "the solution": lambda text, number: text,
    "the number": lambda text, number: f"So it is\n#### {number}",
    "without a blank": lambda text, number: f"####{number}",
    "commas": lambda text, number: f"#### {GROUPED(Decimal(number))}",
    "dollars": lambda text, number: f"#### ${number}",
    "dollars and cents": lambda text, number: f"#### ${GROUPED(Decimal(number))}.00",
    "a trailing dot": lambda text, number: f"#### {number}.",
    "a unit": lambda text, number: f"#### {number} clips",
    "a price": lambda text, number: f"#### ${number}/hour",
    "a speed": lambda text, number: f"#### {number} miles/hour",
    "within tags": lambda text, number: f"<answer>#### {number}</answer>",
    "percent": lambda text, number: f"#### {number}%",
    "minus": lambda text, number: f"#### -{number}",
    "minus dollars": lambda text, number: f"#### -${number}",
    "several": lambda text, number: f"#### {number}1\n#### 17\n#### {number}",
    "several, the last one wrong": lambda text, number: f"#### {number}\n#### {number}1",
    "one without a number behind": lambda text, number: f"#### {number}\n#### done",
    "half of more": lambda text, number: f"#### {number}.5",
    "zeros behind": lambda text, number: f"#### {number}.0",
    "a zero before": lambda text, number: f"#### 0{number}",
    "words only": lambda text, number: "#### I do not know",
    "nothing": lambda text, number: "",
    "a mark only": lambda text, number: "####",
    "bold": lambda text, number: f"#### {number}**",
    "and more text": lambda text, number: f"#### {number}\nI am sure.",
    "glued to a word": lambda text, number: f"#### {number}kg",
    "bold behind the mark": lambda text, number: f"#### **{number}**",
    "a fraction": lambda text, number: f"#### {7 * Fraction(number)}/7",
    "another fraction": lambda text, number: f"#### {number}/7",
    "LaTeX": lambda text, number: f"#### \\${GROUPED(Decimal(number)).replace(',', '{,}')}",
}
# `math` gives 1 to a right answer where `gsm8k` gives 0: it is marked otherwise, or by nothing.
MORE: dict[str, Callable[[str, str], str]] = {
    "a box": lambda text, number: f"So it is \\boxed{{{number}}}.",
    "a line": lambda text, number: f"Hm.\nAnswer: {number}",
    "tags": lambda text, number: f"<think>Hm.</think><answer>{number}</answer>",
    "a sentence": lambda text, number: f"Therefore the answer is {number}.",
}


def real() -> list[Row]:
    rows = [json.loads(line) for line in lzma.decompress(FILE.read_bytes()).splitlines()]
    return [rows[number % len(rows)] for number in range(ANSWERS + ODD)]


def made_up() -> list[Row]:
    return [
        {"question": f"{n} + {n}?", "answer": f"It is {n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}.\n#### {2 * n}"}
        for n in range(2, ANSWERS + ODD + 2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [real, made_up])
def test_rows_have_the_same_grades_but_where_math_reads_more(rows: Callable[[], list[Row]]) -> None:
    all_rows, draw = rows(), random.Random(0)
    counts: Counter[tuple[str, str]] = Counter()
    settings = make_own_task(prompt="question", truth="answer")
    for number, row in enumerate(all_rows):
        mine, theirs = own_task.parse_row(row, settings=settings), gsm8k.parse_row(row)
        assert not isinstance(mine, str) and not isinstance(theirs, str)
        is_right = draw.random() < 0.5
        text = row["answer"] if is_right else draw.choice(all_rows)["answer"]
        answer = str(gsm8k.final_number(text))
        kind, forms = ("same", SAME) if number < ANSWERS else ("more", MORE)
        form = draw.choice(sorted(forms))
        response = forms[form](text, answer)
        grades = (gsm8k.score(response=response, truth=theirs.truth), math(Response(response, mine.truth)))
        is_right = answer == theirs.truth
        counts[kind, f"{grades[0]:g}{grades[1]:g}"] += 1
        if kind == "same":
            assert grades[0] == grades[1], (form, response, theirs.truth)
        else:
            assert grades == (0.0, float(is_right)), (form, response, theirs.truth)
    sys.stdout.write(f"{dict(sorted(counts.items()))}\n")
    assert counts["same", "11"] + counts["same", "00"] == ANSWERS and counts.total() == ANSWERS + ODD
    assert min(counts["same", "11"], counts["same", "00"]) > 300 and len(all_rows) == ANSWERS + ODD

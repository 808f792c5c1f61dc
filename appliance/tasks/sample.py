"""A few problems through their reward: `python -m appliance.tasks.sample`, a Sample as JSON on stdin.

The right answer, in the form that the task asks for, must have reward 1, and an empty response 0. A process of its own:
math-verify stops itself by signals, and sympy is a second to load. Says on stdout, as JSON, what is wrong, or an empty
text; a reward function that raises ends it with a traceback.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from appliance.tasks import arithmetic, dapo_math, gsm8k
from appliance.tasks.grading import checked
from appliance.tasks.library import DAPO_MATH, score
from appliance.tasks.problem import Problem
from appliance.tasks.rows import read_file

SAMPLES = 8
_SHOWN = 60  # characters of a truth


@dataclass(frozen=True)
class Sample:
    """kind: the task.  file: of the user, or empty for `arithmetic`."""

    kind: str
    file: str
    difficulty: int
    seed: int


def sampled(sample: Sample) -> list[Problem]:
    """The first ones of the file, or of the task's own."""
    if sample.kind == "arithmetic":
        sizes = {"train_size": SAMPLES, "val_size": 1}
        return arithmetic.splits(difficulty=sample.difficulty, seed=sample.seed, **sizes).train
    source = dapo_math.SOURCE if sample.kind == DAPO_MATH else gsm8k.SOURCE
    return read_file(sample.file, parse=source.parse, hint=source.hint, most_rows=SAMPLES).problems


def problem_of(sample: Sample) -> str:
    """What is wrong with the rewards of the sample, or an empty text."""
    problems, wrong = sampled(sample), []
    for problem in problems:
        right = checked(score(sample.kind, response=answer(sample.kind, problem.truth), truth=problem.truth))
        empty = checked(score(sample.kind, response="", truth=problem.truth))
        if right.why or right.accuracy != 1.0:
            wrong.append(f"the right answer `{problem.truth[:_SHOWN]}` has {right.why or f'{right.accuracy:g}'}, not 1")
        elif empty.why or empty.accuracy != 0.0:
            wrong.append(f"an empty response has {empty.why or f'{empty.accuracy:g}'}, not 0")
    return f"{len(wrong)} of {len(problems)} sampled rewards are wrong: {wrong[0]}" if wrong else ""


def answer(kind: str, truth: str) -> str:
    """A response with this answer, in the form that the task asks for."""
    return {"arithmetic": truth, "gsm8k": f"#### {truth}", DAPO_MATH: f"Answer: {truth}"}[kind]


def main() -> int:
    sys.stdout.write(json.dumps(problem_of(Sample(**json.load(sys.stdin)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

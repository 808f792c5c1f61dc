"""A few problems through their reward: `python -m appliance.tasks.sample`, a Sample as JSON on stdin.

The right answer, in the form that the task asks for, must have reward 1, and an empty response 0. A process of its own:
math-verify stops itself by signals, and sympy is a second to load. Says on the last line of stdout, as JSON, a Verdict:
libraries may print before it. A reward function that raises ends it with a traceback.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

from appliance.tasks.grading import Graded, checked
from appliance.tasks.library import TASKS, score
from appliance.tasks.problem import Problem

SAMPLES = 8
_SHOWN = 60  # characters of a truth


@dataclass(frozen=True)
class Sample:
    """kind: the task.  file: of the user, or empty."""

    kind: str
    file: str
    difficulty: int
    seed: int


@dataclass(frozen=True)
class Verdict:
    """wrong: how many of the sampled problems have wrong rewards.  first: what is wrong with the first of them."""

    sampled: int
    wrong: int
    first: str


def sampled(sample: Sample) -> list[Problem]:
    """The first ones of the file, or of the task's own."""
    task = TASKS[sample.kind]
    return task.first_problems(SAMPLES, file=sample.file, difficulty=sample.difficulty, seed=sample.seed)


def judge_sample(sample: Sample) -> Verdict:
    problems, wrong = sampled(sample), []
    for problem in problems:
        right = _best_grade(sample.kind, problem.truth)
        empty = checked(score(sample.kind, response="", truth=problem.truth))
        if right.why or right.accuracy != 1.0:
            wrong.append(f"the right answer `{problem.truth[:_SHOWN]}` has {right.why or f'{right.accuracy:g}'}, not 1")
        elif empty.why or empty.accuracy != 0.0:
            wrong.append(f"an empty response has {empty.why or f'{empty.accuracy:g}'}, not 0")
    return Verdict(sampled=len(problems), wrong=len(wrong), first=next(iter(wrong), ""))


def _best_grade(kind: str, truth: str) -> Graded:
    """Of the forms in which a right answer may come; the first one's where none has 1."""
    graded = (checked(score(kind, response=response, truth=truth)) for response in TASKS[kind].answers(truth))
    first = next(graded)
    return first if first.accuracy == 1.0 else next((each for each in graded if each.accuracy == 1.0), first)


def main() -> int:
    verdict = judge_sample(Sample(**json.load(sys.stdin)))
    sys.stdout.write(f"\n{json.dumps(asdict(verdict))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What grading a response gives: how right it is, or why it could not be graded. Imports no torch.

`python -m appliance.tasks.grading` grades a few problems before a run, a Sample as JSON on stdin: the right answer, in
the form that the task asks for, must have reward 1, and an empty response 0. A process of its own: math-verify stops
itself by signals, and sympy is a second to load. Says on the last line of stdout, as JSON, a Verdict: libraries may
print before it. A reward function that raises ends it with a traceback.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass
from enum import StrEnum

from appliance.tasks.library import TASKS, score
from appliance.tasks.rows import Problem

SAMPLES = 8
_SHOWN = 60  # characters of a truth


class Fault(StrEnum):
    """Why a response has no grade of its own."""

    RAISED = "raised"  # the reward function raised
    TIMED_OUT = "timed out"  # it was still at work after the time limit
    DIED = "died"  # its process ended
    NOT_A_GRADE = "not a grade"  # what it returned is not a number in 0..1


@dataclass(frozen=True)
class Graded:
    """accuracy: 0..1, 0 with a fault.  why: the fault in words, empty without one."""

    accuracy: float
    fault: Fault | None = None
    why: str = ""


def checked(value: object) -> Graded:
    """A reward function's value as a grade: a finite number in 0..1, or the fault."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and 0.0 <= value <= 1.0:
        return Graded(float(value))
    return Graded(0.0, Fault.NOT_A_GRADE, f"the reward function returned {value!r:.60}, not a number in 0..1")


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """0 up to max_tokens - buffer_tokens, then falling linearly to -penalty at max_tokens.

    num_tokens: of the response, 0..max_tokens.  buffer_tokens: 1..max_tokens, or 0 for no penalty at all.
    Source: DAPO (Yu et al. 2025), soft overlong punishment; the formula is that of verl's DAPO reward manager.
    """
    if not buffer_tokens:
        return 0.0
    exceeding = num_tokens - (max_tokens - buffer_tokens)
    return min(-exceeding / buffer_tokens * penalty, 0.0)


@dataclass(frozen=True)
class Shaping:
    """From a grade to the reward that trains. Validation reads grades.

    wrong: the reward of a wrong answer, where a right one has 1: 0, or -1 as DAPO has it (eq. 7 of its paper).
    buffer_tokens, penalty: of `overlong_penalty`.
    """

    wrong: float = 0.0
    max_tokens: int = 0
    buffer_tokens: int = 0
    penalty: float = 0.0

    def reward(self, accuracy: float, *, num_tokens: int) -> float:
        """accuracy: 0..1.  num_tokens: of the response."""
        graded = self.wrong + (1.0 - self.wrong) * accuracy
        return graded + overlong_penalty(
            num_tokens, max_tokens=self.max_tokens, buffer_tokens=self.buffer_tokens, penalty=self.penalty
        )


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

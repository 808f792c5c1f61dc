"""What grading a response gives: how right it is, or why it could not be graded. Imports no torch.

`python -m appliance.tasks.grading` grades a few problems before a run, a TaskPlan as JSON on stdin: the right answer,
in the form that the task asks for, must have reward 1, and an empty response 0. A process of its own: math-verify stops
itself by signals, sympy is a second to load, and the user's code runs. Says on the last line of stdout, as JSON, a
Verdict: libraries may print before it. A reward that raises ends it with a traceback.
"""

from __future__ import annotations

import json
import math
import numbers
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from appliance.record.plan import TaskPlan
from appliance.tasks.library import task_of
from appliance.tasks.rows import Problem
from appliance.tasks.task import Response, Reward, Task

SAMPLES = 8
LARGEST = 1e15  # of a reward: a group's variance is computed in float32, which ends at 3e38
_SHOWN = 60  # characters of a truth


class Fault(StrEnum):
    """Why a response has no grade of its own."""

    RAISED = "raised"  # the reward function raised
    TIMED_OUT = "timed out"  # it was still at work after the time limit
    DIED = "died"  # its process ended
    NOT_A_GRADE = "not a grade"  # what it returned is not a finite number


@dataclass(frozen=True)
class Graded:
    """accuracy: 0..1, of a task of the user's own any finite number; 0 with a fault.  why: the fault in words, empty
    without one.  parts: what each reward gave, where there are several or they have names."""

    accuracy: float
    fault: Fault | None = None
    why: str = ""
    parts: tuple[tuple[str, float], ...] = field(default=(), compare=False)


Values = list[tuple[str, float, object]]  # (name, weight, what the reward gave), of one response


def grade(rewards: Sequence[Reward], response: Response) -> Values:
    """Raises what a reward raises."""
    return [(each.name, each.weight, each.value(response)) for each in rewards]


def weighed(values: Values) -> Graded:
    """The weighted sum of what applies; a fault where a value is no finite number, or none applies."""
    total, parts = 0.0, []
    for name, weight, value in values:
        if value is None:
            continue
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            return Graded(0.0, Fault.NOT_A_GRADE, f"the reward `{name}` returned {value!r:.60}, not a finite number")
        total += weight * float(value)
        parts.append((name, float(value)))
    if not parts:
        return Graded(0.0, Fault.NOT_A_GRADE, "no reward applies")
    if not abs(total) <= LARGEST:
        return Graded(0.0, Fault.NOT_A_GRADE, f"the rewards come to {total:g}, which is not within ±{LARGEST:g}")
    return Graded(total, parts=tuple(parts))


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
class Verdict:
    """wrong: how many of the sampled problems have wrong rewards.  first: what is wrong with the first of them."""

    sampled: int
    wrong: int
    first: str


def judge_sample(plan: TaskPlan) -> Verdict:
    """Of the first problems of the file, or of the task's own. Runs the user's rewards."""
    task = task_of(plan)
    problems = task.first_problems(SAMPLES, file=plan.train_file, difficulty=plan.difficulty, seed=plan.seed)
    rewards, wrong = task.rewards(), []
    for problem in problems:
        right = _best_grade(problem, task=task, rewards=rewards)
        empty = _graded("", problem, rewards=rewards)
        if plan.own is not None:
            if right.why or empty.why or right.accuracy <= empty.accuracy:
                earned = f"{right.why or right.accuracy}, an empty response {empty.why or empty.accuracy}"
                wrong.append(f"the truth `{problem.truth[:_SHOWN]}` as the response has {earned}")
        elif right.why or right.accuracy != 1.0:
            wrong.append(f"the right answer `{problem.truth[:_SHOWN]}` has {right.why or f'{right.accuracy:g}'}, not 1")
        elif empty.why or empty.accuracy != 0.0:
            wrong.append(f"an empty response has {empty.why or f'{empty.accuracy:g}'}, not 0")
    return Verdict(sampled=len(problems), wrong=len(wrong), first=next(iter(wrong), ""))


def _graded(text: str, problem: Problem, *, rewards: Sequence[Reward]) -> Graded:
    return weighed(grade(rewards, Response(text, problem.truth, problem.row)))


def _best_grade(problem: Problem, *, task: Task, rewards: Sequence[Reward]) -> Graded:
    """Of the forms in which a right answer may come; the first one's where none has 1."""
    graded = (_graded(text, problem, rewards=rewards) for text in task.answers(problem.truth))
    first = next(graded)
    return first if first.accuracy == 1.0 else next((each for each in graded if each.accuracy == 1.0), first)


def main() -> int:
    verdict = judge_sample(TaskPlan.model_validate_json(sys.stdin.read()))
    sys.stdout.write(f"\n{json.dumps(asdict(verdict))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

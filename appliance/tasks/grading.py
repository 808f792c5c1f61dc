"""What grading a response gives: how right it is, or why it could not be graded. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


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

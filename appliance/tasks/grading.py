"""What grading a response gives: how right it is, or why it could not be graded; and what a validation's grades say.
Imports no torch."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import SupportsFloat

from appliance.tasks.task import Response, RewardFunction
from appliance.tasks.user_code import line_of

PASSES = 1.0  # what the first reward of a sample that passes is at least
LARGEST = 1e15  # of a reward: a group's variance is computed in float32, which ends at 3e38
_SHOWN = 60  # characters of a truth or a value
_LONGEST = 600  # of a message


class Fault(StrEnum):
    """Reason why a response has no grade."""

    RAISED = "raised"  # the reward function raised
    TIMED_OUT = "timed out"  # it was still at work after the time limit
    DIED = "died"  # its process ended
    NOT_A_GRADE = "not a grade"  # what it returned is not a finite number


@dataclass(frozen=True)
class Graded:
    accuracy: float
    """Accuracy in 0..1, in a task of the user's own any finite number; 0 with a fault, or less in a validation."""
    fault: Fault | None = None
    why: str = ""
    """Description of the fault, empty without one."""
    parts: tuple[tuple[str, float], ...] = field(default=(), compare=False)
    """Value of each reward, where there are several or they have names."""


Values = list[tuple[str, float, object]]  # (name, weight, what the reward gave), of one response


def grade(rewards: Sequence[RewardFunction], response: Response) -> Values:
    """Call each reward on a response. Raises what a reward raises."""
    return [(each.name, each.weight, each.value(response)) for each in rewards]


def weigh_rewards(values: Values) -> Graded:
    """Compute the weighted sum of the rewards that apply; a fault where a value is no finite number, or where no reward
    applies."""
    total, parts = 0.0, []
    for name, weight, value in values:
        if value is None:
            continue
        if (number := _finite(value)) is None:
            why = f"the reward `{name}` returned {repr(value)[:_SHOWN]}, not a finite number"
            return Graded(0.0, Fault.NOT_A_GRADE, why)
        total += weight * number
        parts.append((name, number))
    if not parts:
        return Graded(0.0, Fault.NOT_A_GRADE, "no reward applies: each returned None")
    if not abs(total) <= LARGEST:
        return Graded(0.0, Fault.NOT_A_GRADE, f"the rewards add up to {total:g}, which is not within ±{LARGEST:g}")
    return Graded(total, parts=tuple(parts))


def _finite(value: object) -> float | None:
    """Convert what is a finite number, also what libraries have for one: NumPy's scalars, a tensor of one element, a
    Decimal."""
    try:
        is_other = isinstance(value, SupportsFloat) and not isinstance(value, str | bytes | numbers.Complex)
        number = float(value) if isinstance(value, numbers.Real) or is_other else math.nan
    except BaseException:  # the boundary of the user's code: too large a number, or several, raise what they like
        return None
    return number if math.isfinite(number) else None


def in_words(error: BaseException) -> str:
    """Describe an error: its type, its first line, and the line of the user's file that raised it. Never raises, though
    one of the user's may not be printable."""
    try:
        first = (str(error).strip().splitlines() or ["no message"])[0][:_LONGEST] + line_of(error)
    except BaseException:  # the boundary of the user's code: an error's own `__str__` may raise anything
        first = "its message cannot be made"
    return f"{type(error).__name__}: {first}"


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """Compute the penalty of a long response: 0 up to max_tokens - buffer_tokens, then falling linearly to -penalty at
    max_tokens.

    num_tokens: of the response, 0..max_tokens.  buffer_tokens: 1..max_tokens, or 0 for no penalty at all.
    Source: DAPO (Yu et al. 2025), soft overlong punishment; the formula is that of verl's DAPO reward manager.
    """
    if not buffer_tokens:
        return 0.0
    exceeding = num_tokens - (max_tokens - buffer_tokens)
    return min(-exceeding / buffer_tokens * penalty, 0.0)


@dataclass(frozen=True)
class Shaping:
    """Settings that turn a grade into the reward that trains. A validation reads grades."""

    wrong: float = 0.0
    """Reward of a wrong answer, where a right one has 1: 0, or -1 as DAPO has it (eq. 7 of its paper)."""
    max_tokens: int = 0
    buffer_tokens: int = 0
    """Tokens before the limit over which `overlong_penalty` grows."""
    penalty: float = 0.0
    """Largest penalty that `overlong_penalty` gives."""
    samples: int = 0
    """Samples of a prompt, whose rewards are compared with each other, for a task of the user's own, where rewards are
    any numbers; else 0."""

    def comparable(self, value: float) -> float:
        """Round an accuracy or reward such that equal ones of a prompt teach nothing and are filtered."""
        return exact_in_sums(value, num_samples=self.samples) if self.samples else value

    def reward(self, accuracy: float, *, num_tokens: int) -> float:
        """Compute the reward that trains. accuracy: 0..1.  num_tokens: of the response."""
        graded = self.wrong + (1.0 - self.wrong) * accuracy
        return self.comparable(
            graded
            + overlong_penalty(
                num_tokens, max_tokens=self.max_tokens, buffer_tokens=self.buffer_tokens, penalty=self.penalty
            )
        )


def exact_in_sums(value: float, *, num_samples: int) -> float:
    """Return the nearest number of which `num_samples` equal ones have an exact sum in float32: its bits are 24 less
    those of `num_samples`.

    The mean of such a group is its value and its deviation 0. verl takes the mean in float32 and divides what is left
    by deviation + 1e-6: of 8 times 100.3, rounding alone would make advantages of 0.8. DAPO's filter asks whether the
    deviation is 0, which that of equal numbers is not: of 3 times 0.1 it is 1e-17.
    """
    bits = 24 - (num_samples - 1).bit_length()
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)


def set_metrics(name: str, graded: Sequence[Sequence[Graded]], *, first_reward: str) -> dict[str, float]:
    """Compute metrics by the names of docs/metrics.md: `val/<name>/avg@<n>` first, then `val/<name>/pass@<k>` for k =
    1, 2, 4 .. n.

    graded: of each problem its n samples, n >= 1 and the same for all; a fault counts what it has, and does not pass.
    first_reward: by which a sample passes; empty: there is one.
    """
    samples = len(graded[0])
    accuracies = [grade.accuracy for problem in graded for grade in problem]
    passed = [sum(is_pass(each, first_reward=first_reward) for each in problem) for problem in graded]
    return {f"val/{name}/avg@{samples}": math.fsum(accuracies) / len(accuracies)} | {
        f"val/{name}/pass@{k}": math.fsum(pass_at(k, samples=samples, passed=each) for each in passed) / len(passed)
        for k in sample_counts(samples)
    }


def is_pass(graded: Graded, *, first_reward: str) -> bool:
    """Tell whether the reward of that name (empty: the only one) applies and is at least 1."""
    return any(value >= PASSES for name, value in graded.parts if not first_reward or name == first_reward)


def pass_at(k: int, *, samples: int, passed: int) -> float:
    """Compute 1 - C(n - c, k) / C(n, k): the chance that of k samples, drawn from these n without putting back, one
    passes.

    samples: n.  passed: c, 0..n.  k: 1..n.
    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", the unbiased estimator of pass@k.
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def sample_counts(samples: int) -> Iterator[int]:
    """Yield the powers of two below the number of samples, and that number."""
    k = 1
    while k < samples:
        yield k
        k *= 2
    yield samples

"""Grades, DAPO's rewards and its penalty for long responses."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from appliance.tasks.grading import Fault, Graded, Shaping, overlong_penalty, weigh_rewards


@pytest.mark.parametrize("value", [0, 1, 0.5, -3.5, True, Fraction(1, 4), Decimal(2), np.bool_(True), np.float32(0.5)])
def test_a_finite_number_is_a_grade(value: float) -> None:
    graded = weigh_rewards([("one", 1.0, value)])
    assert (graded, graded.parts) == (Graded(float(value)), (("one", float(value)),))


class Interrupts:
    def __float__(self) -> float:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "value",
    [
        *(float("nan"), float("inf"), "1", [1], 1j, np.complex64(1), np.str_("1"), Decimal("sNaN"), np.array([1, 2])),
        Interrupts(),
    ],
)
def test_anything_else_is_a_fault(value: object) -> None:
    why = f"the reward `two` returned {value!r}, not a finite number"
    assert weigh_rewards([("one", 1.0, 1.0), ("two", 1.0, value)]) == Graded(0.0, Fault.NOT_A_GRADE, why)


def test_rewards_are_weighed_and_summed_and_what_does_not_apply_is_left_out() -> None:
    graded = weigh_rewards([("one", 1.0, 0.5), ("two", 0.25, -2.0), ("three", 9.0, None)])
    assert (graded, graded.parts) == (Graded(0.0), (("one", 0.5), ("two", -2.0)))
    assert weigh_rewards([("one", 1.0, None)]) == Graded(
        0.0, Fault.NOT_A_GRADE, "no reward applies: each returned None"
    )


@pytest.mark.parametrize("value", [1.01e15, -1e300])
def test_what_no_variance_can_be_computed_of_is_a_fault(value: float) -> None:
    assert weigh_rewards([("one", 1.0, math.copysign(1e15, value))]).fault is None
    why = f"the rewards add up to {value:g}, which is not within ±1e+15"
    assert weigh_rewards([("one", 1.0, value)]) == Graded(0.0, Fault.NOT_A_GRADE, why)
    assert weigh_rewards([("one", 1e300, 1e300)]).why == "the rewards add up to inf, which is not within ±1e+15"


def test_penalty_starts_where_the_buffer_does_and_ends_at_the_whole() -> None:
    """The reference run's: 20480 tokens, the last 4096 of them cost up to 1."""
    sizes = {"max_tokens": 20480, "buffer_tokens": 4096, "penalty": 1.0}
    found = [overlong_penalty(tokens, **sizes) for tokens in (0, 16384, 16385, 18432, 20480)]
    assert found == [0.0, 0.0, -1 / 4096, -0.5, -1.0]


def test_no_buffer_no_penalty() -> None:
    assert overlong_penalty(100, max_tokens=100, buffer_tokens=0, penalty=1.0) == 0.0


@pytest.mark.parametrize(
    ("accuracy", "tokens", "reward"),
    [(1.0, 10, 1.0), (0.0, 10, -1.0), (0.5, 10, 0.0), (1.0, 100, 0.0), (0.0, 100, -2.0), (1.0, 90, 0.5)],
)
def test_dapo_rewards_are_one_and_minus_one_less_the_penalty(accuracy: float, tokens: int, reward: float) -> None:
    shaping = Shaping(wrong=-1.0, max_tokens=100, buffer_tokens=20, penalty=1.0)
    assert math.isclose(shaping.reward(accuracy, num_tokens=tokens), reward, abs_tol=1e-12)


def test_without_shaping_a_reward_is_the_grade() -> None:
    assert [Shaping().reward(each, num_tokens=9) for each in (0.0, 0.25, 1.0)] == [0.0, 0.25, 1.0]

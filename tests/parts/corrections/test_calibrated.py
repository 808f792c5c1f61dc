"""The fit of clip bounds: against a count by hand, invariances, limits, values that are not finite."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from appliance.corrections.calibrated import CalibratedClipping, fit_bounds
from appliance.corrections.objective import ClipRange
from appliance.errors import NumericsError

NOMINAL = ClipRange(low=0.2, high=0.28)
EXAMPLES = settings(deadline=None, max_examples=200, derandomize=True)
PAIRS = st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=60)


def split(pairs: list[tuple[float, float]]) -> tuple[Tensor, Tensor]:
    """(log R, log B): B is R with noise on it."""
    full_T = torch.tensor([full for full, _ in pairs], dtype=torch.float64)
    return full_T, full_T + torch.tensor([noise for _, noise in pairs], dtype=torch.float64)


def clipped(log_ratio_T: Tensor, *, bounds: ClipRange) -> tuple[int, int]:
    """(above, below) in numpy's float64, by the ratio itself, with what lies within 1e-12 of a bound inside."""
    ratio = np.exp(log_ratio_T.numpy())
    above = ratio > (1 + bounds.high) * (1 + 1e-12)
    return int(above.sum()), int((ratio < (1 - bounds.low) * (1 - 1e-12)).sum())


@given(pairs=PAIRS)
@EXAMPLES
def test_as_many_tokens_are_clipped_as_in_full_precision(pairs: list[tuple[float, float]]) -> None:
    """Exactly as many where a bound moved and no two tokens tie; fewer where the recipe's bound holds."""
    full_T, rollout_T = split(pairs)
    fit = fit_bounds(full_T, rollout_T=rollout_T, nominal=NOMINAL)
    wanted_above, wanted_below = int((full_T > math.log(1.28)).sum()), int((full_T < math.log(0.8)).sum())
    assert (fit.tokens, fit.above, fit.below) == (len(pairs), wanted_above, wanted_below)
    above, below = clipped(rollout_T, bounds=fit.bounds)
    assert above <= fit.above and below <= fit.below
    ratios = set(rollout_T.tolist())
    if len(ratios) == len(pairs) and min(np.diff(sorted(ratios)), default=1) > 1e-9:
        assert above == fit.above or fit.bounds.high == NOMINAL.high
        assert below == fit.below or fit.bounds.low == NOMINAL.low
    assert (fit.unfitted_above, fit.unfitted_below) == (
        int((rollout_T > math.log1p(0.28)).sum()),
        int((rollout_T < math.log1p(-0.2)).sum()),
    )


@given(pairs=PAIRS)
@EXAMPLES
def test_a_bound_is_only_ever_widened(pairs: list[tuple[float, float]]) -> None:
    full_T, rollout_T = split(pairs)
    fit = fit_bounds(full_T, rollout_T=rollout_T, nominal=NOMINAL)
    assert NOMINAL.low <= fit.bounds.low < 1 and fit.bounds.high >= NOMINAL.high
    without = fit_bounds(full_T, rollout_T=full_T, nominal=NOMINAL)
    assert without.bounds == NOMINAL  # no mismatch: the recipe's bounds to the last bit


@given(pairs=PAIRS, seed=st.integers(0, 9))
@EXAMPLES
def test_the_order_of_tokens_and_sequences_changes_nothing(pairs: list[tuple[float, float]], seed: int) -> None:
    full_T, rollout_T = split(pairs)
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))
    one = fit_bounds(full_T, rollout_T=rollout_T, nominal=NOMINAL)
    assert fit_bounds(full_T[order], rollout_T=rollout_T[order], nominal=NOMINAL) == one


def test_a_fit_by_hand() -> None:
    """Of ten tokens two leave 1.28 in full precision, one 0.8: the third largest and the second smallest of B."""
    full_T = torch.tensor([1.5, 1.3, *[1.0] * 7, 0.7], dtype=torch.float64).log()
    rollout = [1.6, 1.9, 1.45, 1.2, 1.1, 1.0, 0.9, 0.72, 0.65, 0.5]
    fit = fit_bounds(full_T, rollout_T=torch.tensor(rollout, dtype=torch.float64).log(), nominal=NOMINAL)
    assert (fit.above, fit.below, fit.unfitted_above, fit.unfitted_below) == (2, 1, 3, 3)
    assert (1 + fit.bounds.high, 1 - fit.bounds.low) == (pytest.approx(1.45), pytest.approx(0.65))


def test_every_token_beyond_a_bound() -> None:
    """All of B's tokens may be clipped then, and the bound stays the recipe's: nothing says to widen it."""
    far_T = torch.full((5,), 3.0)
    assert fit_bounds(far_T, rollout_T=far_T, nominal=NOMINAL).bounds == NOMINAL
    assert fit_bounds(-far_T, rollout_T=-far_T, nominal=NOMINAL).bounds == NOMINAL


def test_a_policy_that_did_not_move_has_none_of_the_scatter_clipped() -> None:
    """As after an update at learning rate 0."""
    rollout_T = torch.tensor([1.0, 1.5, 1.4, 0.6, 0.7], dtype=torch.float64).log()
    bounds = fit_bounds(torch.zeros(5), rollout_T=rollout_T, nominal=NOMINAL).bounds
    assert (1 + bounds.high, 1 - bounds.low) == (pytest.approx(1.5), pytest.approx(0.6))


def test_a_ratio_beyond_every_number_stays_finite() -> None:
    fit = fit_bounds(torch.zeros(3), rollout_T=torch.tensor([0.0, 900.0, -900.0]), nominal=NOMINAL)
    assert math.isfinite(fit.bounds.high) and fit.bounds.low <= 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", ["full", "rollout"])
def test_a_value_that_is_not_finite_raises(bad: float, side: str) -> None:
    good_T, bad_T = torch.zeros(3), torch.tensor([0.0, bad, 0.0])
    full_T, rollout_T = (bad_T, good_T) if side == "full" else (good_T, bad_T)
    with pytest.raises(NumericsError) as raised:
        fit_bounds(full_T, rollout_T=rollout_T, nominal=NOMINAL)
    assert raised.value.message == "a log-probability of the shadow batch is not finite"


@given(low=st.floats(0, 1, exclude_max=True), high=st.floats(0, 1e6), cap=st.floats(0.1, 100))
@EXAMPLES
def test_no_bound_leaves_the_cap_nor_comes_inside_the_recipes(low: float, high: float, cap: float) -> None:
    clip_range = CalibratedClipping(cap=cap, clip=NOMINAL, fitted=ClipRange(low, high)).clip_range
    assert NOMINAL.low <= clip_range.low <= max(NOMINAL.low, 1 - 1 / cap)
    assert NOMINAL.high <= clip_range.high <= max(NOMINAL.high, cap - 1)
    if low >= NOMINAL.low and high >= NOMINAL.high and cap > 1e6 + 1:
        assert clip_range == ClipRange(low, high)


def test_outside_is_what_the_ratio_before_an_update_would_be_clipped_at() -> None:
    x_BT = torch.tensor([[0.7, 0.81, 1.0, 1.27, 1.29]], dtype=torch.float64).log()
    found = CalibratedClipping(cap=2.0, clip=NOMINAL).apply(x_BT, real_BT=torch.ones_like(x_BT))
    assert found.acted_BT.tolist() == [[True, False, False, False, True]]
    assert (found.lower_BT[0, 0], found.upper_BT[0, 0]) == (0.8, 1.28)

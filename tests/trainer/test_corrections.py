"""Corrections as pure functions: ranges, masks, gradients, padding, splits, values that are not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from corrections_reference import PLANS, SHARE, make_case, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from appliance.errors import NumericsError
from appliance.quant.correction import CorrectionMethod as Method
from appliance.trainer.corrections import (
    CLAMP,
    Corrected,
    correct,
    log_ratio,
    sequence_weights,
    token_weights,
    upper_clip,
)

ROWS = st.lists(st.lists(st.floats(-40, 40), min_size=1, max_size=12), min_size=1, max_size=8)
CAP = st.floats(0.01, 100)
EXAMPLES = settings(deadline=None, max_examples=100, derandomize=True)
# float64 sums of at most 24 terms in another order: 24 * 2^-53 of their absolute sum, and exp makes that relative.
RTOL = 1e-12


def padded(rows: list[list[float]], *, extra: int = 0, junk: float = 7.0) -> tuple[Tensor, Tensor]:
    """(x_BT with `junk` at padding, mask_BT)."""
    tokens = max(len(row) for row in rows) + extra
    x = np.full((len(rows), tokens), junk)
    mask = np.zeros((len(rows), tokens), dtype=bool)
    for index, row in enumerate(rows):
        x[index, : len(row)], mask[index, : len(row)] = row, True
    x_BT, mask_BT = torch.from_numpy(x), torch.from_numpy(mask)
    return log_ratio(x_BT, rollout_BT=torch.zeros_like(x_BT), mask_BT=mask_BT), mask_BT


@pytest.mark.parametrize("method", PLANS)
@pytest.mark.parametrize("seed", range(3))
def test_every_correction_equals_its_definition(method: Method, seed: int) -> None:
    case, plan = make_case(seed), PLANS[method]
    x_BT = log_ratio(case.trainer_BT, rollout_BT=case.rollout_BT, mask_BT=case.mask_BT)
    found = correct(x_BT, mask_BT=case.mask_BT, plan=plan, share=SHARE)
    weights, stay = reference(case, plan=plan)
    assert [row.tolist() for row in case.rows(found.kept_BT)] == stay
    assert (found.weights_BT is None) == (weights is None)
    if found.weights_BT is not None:
        for row, wanted in zip(case.rows(found.weights_BT), weights, strict=True):
            assert row.tolist() == pytest.approx(wanted, rel=RTOL)
        assert found.weights_BT[~case.mask_BT].abs().sum() == 0


@given(rows=ROWS, cap=CAP)
@EXAMPLES
def test_weights_lie_above_zero_and_at_most_at_the_cap(rows: list[list[float]], cap: float) -> None:
    x_BT, mask_BT = padded(rows)
    for weigh in (token_weights, sequence_weights):
        weights_BT = weigh(x_BT, mask_BT=mask_BT, cap=cap)
        assert bool((weights_BT[mask_BT] > 0).all()) and bool((weights_BT <= cap).all())
        assert weights_BT[~mask_BT].abs().sum() == 0
        raw_BT = weigh(x_BT, mask_BT=mask_BT)
        assert bool((raw_BT <= np.exp(CLAMP) * (1 + RTOL)).all())
        assert torch.equal(raw_BT.clamp(max=cap), weights_BT)


@given(rows=ROWS)
@EXAMPLES
def test_every_weight_of_a_batch_is_within_the_methods_limits(rows: list[list[float]]) -> None:
    """Above 0, at most at the cap; icepop's may be 0 too; adaptive's mixes in a 1; acr's loss truncates by itself."""
    x_BT, mask_BT = padded(rows)
    for plan in PLANS.values():
        found = correct(x_BT, mask_BT=mask_BT, plan=plan, share=SHARE)
        if found.weights_BT is None:
            continue
        weights_T = found.weights_BT[mask_BT]
        assert bool(torch.isfinite(weights_T).all()) and not bool(found.weights_BT[~mask_BT].any())
        if plan.method is Method.ICEPOP:
            low, high = plan.bounds
            inside_T = (weights_T >= low * (1 - RTOL)) & (weights_T <= high * (1 + RTOL))
            assert bool((inside_T | (weights_T == 0)).all())
            continue
        most = np.exp(CLAMP) * (1 + RTOL) if plan.method is Method.ACR else plan.cap
        assert bool((weights_T > 0).all()) and bool((weights_T <= most).all())


@given(rows=ROWS, extra=st.integers(1, 9), junk=st.sampled_from([0.0, -50.0, float("nan"), float("inf")]))
@EXAMPLES
def test_padding_changes_nothing(rows: list[list[float]], extra: int, junk: float) -> None:
    x_BT, mask_BT = padded(rows)
    wide_BT, wide_mask_BT = padded(rows, extra=extra, junk=junk)
    for plan in PLANS.values():
        one, other = (
            correct(x_BT, mask_BT=mask_BT, plan=plan, share=SHARE),
            correct(wide_BT, mask_BT=wide_mask_BT, plan=plan, share=SHARE),
        )
        assert_same(one, other, mask_BT=mask_BT, other_mask_BT=wide_mask_BT)


@given(rows=ROWS, at=st.integers(0, 8))
@EXAMPLES
def test_a_split_into_micro_batches_changes_nothing(rows: list[list[float]], at: int) -> None:
    x_BT, mask_BT = padded(rows)
    for plan in PLANS.values():
        whole = correct(x_BT, mask_BT=mask_BT, plan=plan, share=SHARE)
        halves = [
            correct(x_BT[part], mask_BT=mask_BT[part], plan=plan, share=SHARE) for part in (slice(at), slice(at, None))
        ]
        together = Corrected(
            None if whole.weights_BT is None else torch.cat([each.weights_BT for each in halves]),
            torch.cat([each.kept_BT for each in halves]),
            torch.cat([each.acted_BT for each in halves]),
            torch.cat([each.margin_BT for each in halves]),
        )
        assert_same(whole, together, mask_BT=mask_BT, other_mask_BT=mask_BT)


def assert_same(one: Corrected, other: Corrected, *, mask_BT: Tensor, other_mask_BT: Tensor) -> None:
    """At real tokens; a decision within rounding of a limit may differ (sums in another order)."""
    clear_T = one.margin_BT[mask_BT] > 1e-6
    assert torch.equal(one.kept_BT[mask_BT][clear_T], other.kept_BT[other_mask_BT][clear_T])
    if one.weights_BT is not None:
        found_T, wanted_T = one.weights_BT[mask_BT][clear_T], other.weights_BT[other_mask_BT][clear_T]
        assert torch.allclose(found_T, wanted_T, rtol=RTOL, atol=0)


@given(rows=ROWS)
@EXAMPLES
def test_every_real_token_is_kept_or_acted_on(rows: list[list[float]]) -> None:
    x_BT, mask_BT = padded(rows)
    for plan in PLANS.values():
        found = correct(x_BT, mask_BT=mask_BT, plan=plan, share=SHARE)
        assert torch.equal(found.kept_BT | found.acted_BT, mask_BT)
        if plan.method is Method.CALIBRATED_CLIPPING:
            assert torch.equal(found.kept_BT, mask_BT)  # the loss clips, nothing is dropped
        elif found.weights_BT is None:
            assert not bool((found.kept_BT & found.acted_BT).any())
            whole_B = (found.kept_BT == mask_BT).all(dim=-1) | ~found.kept_BT.any(dim=-1)
            assert bool(whole_B.all())  # a sequence stays or goes as one


@pytest.mark.parametrize("method", PLANS)
def test_no_gradient_flows_through_a_weight(method: Method) -> None:
    case = make_case(0)
    trainer_BT = case.trainer_BT.clone().requires_grad_()
    x_BT = log_ratio(trainer_BT, rollout_BT=case.rollout_BT, mask_BT=case.mask_BT)
    found = correct(x_BT, mask_BT=case.mask_BT, plan=PLANS[method], share=SHARE)
    assert not x_BT.requires_grad
    assert found.weights_BT is None or not found.weights_BT.requires_grad
    leaf_BT = torch.zeros(2, 3, requires_grad=True)
    mask_BT = torch.ones(2, 3, dtype=torch.bool)
    for weights_BT in (token_weights(leaf_BT, mask_BT=mask_BT), sequence_weights(leaf_BT, mask_BT=mask_BT)):
        assert not weights_BT.requires_grad
    assert not upper_clip(leaf_BT, cap=2.0, clip_high=0.2).requires_grad


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", ["trainer", "rollout", "both"])
def test_a_log_prob_that_is_not_finite_raises(bad: float, side: str) -> None:
    """Both at -inf would be NaN, both at NaN too: nothing cancels out."""
    good_BT, bad_BT = torch.full((2, 3), -1.0), torch.tensor([[-1.0, -1.0, -1.0], [-1.0, bad, -1.0]])
    trainer_BT = good_BT if side == "rollout" else bad_BT
    rollout_BT = good_BT if side == "trainer" else bad_BT
    with pytest.raises(NumericsError) as raised:
        log_ratio(trainer_BT, rollout_BT=rollout_BT, mask_BT=torch.ones(2, 3))
    assert raised.value.message == "a log-probability of this step's rollouts is not finite"
    mask_BT = torch.tensor([[1, 1, 1], [1, 0, 0]])
    assert bool(torch.isfinite(log_ratio(trainer_BT, rollout_BT=rollout_BT, mask_BT=mask_BT)).all())


@given(weights=st.lists(st.floats(0, 1e9), min_size=1, max_size=20), cap=CAP, high=st.floats(0.01, 2))
@EXAMPLES
def test_the_upper_bound_rises_only_where_a_weight_was_cut(weights: list[float], cap: float, high: float) -> None:
    raw_T = torch.tensor(weights, dtype=torch.float64)
    upper_T = upper_clip(raw_T, cap=cap, clip_high=high)
    cut_T = raw_T > cap
    assert bool((upper_T[~cut_T] == 1 + high).all())
    assert bool((upper_T >= 1 + high).all())
    # the definition by probabilities: (1 + e) / r, r = min(1, C * p_rollout / p_trainer)
    wanted = [(1 + high) / min(1.0, cap / weight) if weight else 1 + high for weight in weights]
    assert upper_T.tolist() == pytest.approx(wanted, rel=RTOL)


def test_identical_policies_are_left_alone() -> None:
    x_BT, mask_BT = padded([[0.0] * 5, [0.0]])
    for plan in PLANS.values():
        found = correct(x_BT, mask_BT=mask_BT, plan=plan, share=SHARE)
        assert torch.equal(found.kept_BT, mask_BT) and not bool(found.acted_BT.any())
        assert found.weights_BT is None or torch.equal(found.weights_BT, mask_BT.double())

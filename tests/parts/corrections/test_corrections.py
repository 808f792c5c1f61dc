"""Corrections as pure functions: ranges, masks, gradients, padding, splits, values that are not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from corrections_reference import OF_A_STEP, make_case, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from appliance.corrections.base import CLAMP, Corrected, log_ratio
from appliance.corrections.objective import ClipRange
from appliance.corrections.weights import Acr, Tis, TisSequence
from appliance.errors import NumericsError

ROWS = st.lists(st.lists(st.floats(-40, 40), min_size=1, max_size=12), min_size=1, max_size=8)
CAP = st.floats(0.01, 100)
EXAMPLES = settings(deadline=None, max_examples=100, derandomize=True)
# float64 sums of at most 24 terms in another order: 24 * 2^-53 of their absolute sum, and exp makes that relative.
RTOL = 1e-12
PASSIVE = ("none", "score-centering")  # of tokens: what centers adds a term of its own
MASKS = ("sequence-mask", "geometric-mask", "k3-reject")


def padded(rows: list[list[float]], *, extra: int = 0, junk: float = 7.0) -> tuple[Tensor, Tensor]:
    """(x_BT with `junk` at padding, real_BT)."""
    tokens = max(len(row) for row in rows) + extra
    x = np.full((len(rows), tokens), junk)
    mask = np.zeros((len(rows), tokens), dtype=bool)
    for index, row in enumerate(rows):
        x[index, : len(row)], mask[index, : len(row)] = row, True
    x_BT, real_BT = torch.from_numpy(x), torch.from_numpy(mask)
    return log_ratio(x_BT, rollout_BT=torch.zeros_like(x_BT), real_BT=real_BT), real_BT


@pytest.mark.parametrize("name", OF_A_STEP)
@pytest.mark.parametrize("seed", range(3))
def test_every_correction_equals_its_definition(name: str, seed: int) -> None:
    case, correction = make_case(seed), OF_A_STEP[name]
    corrected = correction.apply(case.part.x_BT, real_BT=case.mask_BT)
    weights, stay = reference(case, correction=correction)
    assert [row.tolist() for row in case.rows(corrected.kept_BT)] == stay
    for row, wanted in zip(case.rows(corrected.weights_BT), weights, strict=True):
        assert row.tolist() == pytest.approx(wanted, rel=RTOL)
    assert corrected.weights_BT[~case.mask_BT].abs().sum() == 0
    assert 0.05 < corrected.acted_BT[case.mask_BT].double().mean() < 0.95 or name in PASSIVE  # every limit is at work


@pytest.mark.parametrize("name", OF_A_STEP)
def test_a_method_that_makes_the_same_of_all_tokens_of_a_response_says_so(name: str) -> None:
    case, correction = make_case(0), OF_A_STEP[name]
    found = correction.apply(case.part.x_BT, real_BT=case.mask_BT)
    rows = (row for values in (found.weights_BT, found.kept_BT) for row in case.rows(values))
    assert correction.of_tokens == (correction.clips or any(len(row.unique()) > 1 for row in rows))


@given(rows=ROWS, cap=CAP)
@EXAMPLES
def test_weights_lie_above_zero_and_at_most_at_the_cap(rows: list[list[float]], cap: float) -> None:
    x_BT, real_BT = padded(rows)
    for method in (Tis, TisSequence):
        weights_BT = method(cap=cap).apply(x_BT, real_BT=real_BT).weights_BT
        assert bool((weights_BT[real_BT] > 0).all()) and bool((weights_BT <= cap).all())
        raw_BT = method(cap=1e300).apply(x_BT, real_BT=real_BT).weights_BT
        assert bool((raw_BT <= np.exp(CLAMP) * (1 + RTOL)).all())
        assert torch.equal(raw_BT.clamp(max=cap), weights_BT)


@given(rows=ROWS)
@EXAMPLES
def test_every_weight_of_a_batch_is_within_the_methods_limits(rows: list[list[float]]) -> None:
    """Above 0, at most at the cap; icepop's may be 0 too; adaptive's mixes in a 1; else it is 1."""
    x_BT, real_BT = padded(rows)
    for name, correction in OF_A_STEP.items():
        weights_BT = correction.apply(x_BT, real_BT=real_BT).weights_BT
        weights_T = weights_BT[real_BT]
        assert bool(torch.isfinite(weights_T).all()) and not bool(weights_BT[~real_BT].any())
        if name == "icepop":
            low, high = correction.bounds
            inside_T = (weights_T >= low * (1 - RTOL)) & (weights_T <= high * (1 + RTOL))
            assert bool((inside_T | (weights_T == 0)).all())
        elif name in (*MASKS, *PASSIVE, "calibrated-clipping"):
            assert bool((weights_T == 1).all())
        else:
            assert bool((weights_T > 0).all()) and bool((weights_T <= correction.cap).all())


@given(rows=ROWS, extra=st.integers(1, 9), junk=st.sampled_from([0.0, -50.0, float("nan"), float("inf")]))
@EXAMPLES
def test_padding_changes_nothing(rows: list[list[float]], extra: int, junk: float) -> None:
    x_BT, real_BT = padded(rows)
    wide_BT, wide_real_BT = padded(rows, extra=extra, junk=junk)
    for correction in OF_A_STEP.values():
        one = correction.apply(x_BT, real_BT=real_BT)
        assert_same(one, correction.apply(wide_BT, real_BT=wide_real_BT), real_BT=real_BT, other_real_BT=wide_real_BT)


@given(rows=ROWS, at=st.integers(0, 8))
@EXAMPLES
def test_a_split_into_micro_batches_changes_nothing(rows: list[list[float]], at: int) -> None:
    x_BT, real_BT = padded(rows)
    for correction in OF_A_STEP.values():
        whole = correction.apply(x_BT, real_BT=real_BT)
        halves = [correction.apply(x_BT[part], real_BT=real_BT[part]) for part in (slice(at), slice(at, None))]
        names = ("weights_BT", "kept_BT", "acted_BT")
        together = Corrected(**{name: torch.cat([getattr(each, name) for each in halves]) for name in names})
        assert_same(whole, together, real_BT=real_BT, other_real_BT=real_BT)
        counted = [
            correction.count(each, real_BT=real_BT[part])
            for each, part in zip(halves, (slice(at), slice(at, None)), strict=True)
        ]
        for key, value in correction.count(whole, real_BT=real_BT).items():
            assert sum(each[key] for each in counted) == pytest.approx(value, rel=RTOL)


def assert_same(left: Corrected, right: Corrected, *, real_BT: Tensor, other_real_BT: Tensor) -> None:
    """At real tokens."""
    assert torch.equal(left.kept_BT[real_BT], right.kept_BT[other_real_BT])
    assert torch.allclose(left.weights_BT[real_BT], right.weights_BT[other_real_BT], rtol=RTOL, atol=0)


@given(rows=ROWS)
@EXAMPLES
def test_every_real_token_is_kept_or_acted_on(rows: list[list[float]]) -> None:
    x_BT, real_BT = padded(rows)
    for name, correction in OF_A_STEP.items():
        corrected = correction.apply(x_BT, real_BT=real_BT)
        assert torch.equal(corrected.kept_BT | corrected.acted_BT, real_BT)
        if name in MASKS:
            assert not bool((corrected.kept_BT & corrected.acted_BT).any())
            whole_B = (corrected.kept_BT == real_BT).all(dim=-1) | ~corrected.kept_BT.any(dim=-1)
            assert bool(whole_B.all())  # a sequence stays or goes as one
        else:
            assert torch.equal(corrected.kept_BT, real_BT)  # weighed or clipped, nothing is dropped


@pytest.mark.parametrize("name", OF_A_STEP)
def test_no_gradient_flows_through_a_correction(name: str) -> None:
    leaf_BT = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    found = OF_A_STEP[name].apply(leaf_BT, real_BT=torch.ones(2, 3, dtype=torch.bool))
    assert not any(value.requires_grad for value in vars(found).values() if value is not None)
    case = make_case(0)
    trainer_BT = case.trainer_BT.clone().requires_grad_()
    assert not log_ratio(trainer_BT, rollout_BT=case.rollout_BT, real_BT=case.mask_BT).requires_grad


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", ["trainer", "rollout", "both"])
def test_a_log_prob_that_is_not_finite_raises(bad: float, side: str) -> None:
    """Both at -inf would be NaN, both at NaN too: nothing cancels out."""
    good_BT, bad_BT = torch.full((2, 3), -1.0), torch.tensor([[-1.0, -1.0, -1.0], [-1.0, bad, -1.0]])
    trainer_BT = good_BT if side == "rollout" else bad_BT
    rollout_BT = good_BT if side == "trainer" else bad_BT
    with pytest.raises(NumericsError) as raised:
        log_ratio(trainer_BT, rollout_BT=rollout_BT, real_BT=torch.ones(2, 3))
    assert raised.value.message == "a log-probability of this step's rollouts is not finite"
    real_BT = torch.tensor([[1, 1, 1], [1, 0, 0]])
    assert bool(torch.isfinite(log_ratio(trainer_BT, rollout_BT=rollout_BT, real_BT=real_BT)).all())


@given(weights=st.lists(st.floats(1e-8, 1e8), min_size=1, max_size=20), cap=CAP, high=st.floats(0.01, 2))
@EXAMPLES
def test_acrs_upper_bound_rises_only_where_a_weight_was_cut(weights: list[float], cap: float, high: float) -> None:
    x_BT, real_BT = padded([np.log(weights).tolist()])
    acr = Acr(cap=cap, clip=ClipRange(0.3, high))
    corrected = acr.apply(x_BT, real_BT=real_BT)
    cut_T, upper_T = corrected.acted_BT[0], corrected.upper_BT[0]
    assert bool((upper_T[~cut_T] == 1 + high).all()) and bool((upper_T >= 1 + high).all())
    # the definition by probabilities: (1 + e) / r, r = min(1, C * p_rollout / p_trainer)
    assert upper_T.tolist() == pytest.approx([(1 + high) / min(1.0, cap / weight) for weight in weights], rel=1e-9)
    assert bool((corrected.lower_BT == 1 - 0.3).all())
    sums = acr.count(corrected, real_BT=real_BT)
    metrics, wide_T = acr.metrics(sums), upper_T[upper_T > 1 + high]
    assert metrics["acr_widened_fraction"] == len(wide_T) / len(weights)
    assert metrics["acr_bound_mean"] == (pytest.approx(float(wide_T.mean())) if len(wide_T) else None)


def test_identical_policies_are_left_alone() -> None:
    x_BT, real_BT = padded([[0.0] * 5, [0.0]])
    for correction in OF_A_STEP.values():
        found = correction.apply(x_BT, real_BT=real_BT)
        assert torch.equal(found.kept_BT, real_BT) and not bool(found.acted_BT.any())
        assert torch.equal(found.weights_BT, real_BT.double())

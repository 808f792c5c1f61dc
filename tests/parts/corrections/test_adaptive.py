"""How much of the correction a step gets: the formula in float64, its limits, and that parts of a batch add up."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from appliance.corrections.adaptive import K3_SCALE, Adaptive, mixing, moments
from appliance.corrections.base import StepPart, log_ratio
from appliance.errors import NumericsError

EXAMPLES = settings(deadline=None, max_examples=100, derandomize=True)
TOKENS = st.lists(st.tuples(st.floats(-40, 40), st.floats(-5, 5)), min_size=1, max_size=30)
CAP = st.floats(0.1, 10)


def measured(x: list[float], advantages: list[float], *, cap: float) -> dict[str, float]:
    row, ones = torch.tensor([x], dtype=torch.float64), torch.ones(1, len(x))
    x_BT = log_ratio(row, rollout_BT=torch.zeros_like(row), real_BT=ones)
    return moments(StepPart(x_BT, ones, torch.tensor([advantages])), cap=cap)


def reference(x: list[float], advantages: list[float], *, cap: float) -> float:
    x_T = np.clip(np.array(x, dtype=np.longdouble), -20, 20)
    a_T, w_T = np.array(advantages, dtype=np.float32).astype(np.longdouble), np.exp(x_T)
    reliability = w_T.sum() ** 2 / (len(x) * (w_T**2).sum())
    severity = 1 - np.exp(-np.mean(w_T - 1 - x_T) / K3_SCALE)
    plain = (a_T**2).sum()
    amplification = max(1.0, (np.minimum(w_T, cap) ** 2 * a_T**2).sum() / plain) if plain else 1.0
    return float(reliability * severity / amplification)


@pytest.mark.parametrize("spread", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_share_is_the_formula(spread: float, seed: int) -> None:
    """Sums of 500 terms in float64: 500 * 2^-53; the reference's k3 of 1e-6 loses 6 of longdouble's 19 digits."""
    rng = np.random.default_rng(seed)
    x, advantages = rng.normal(0, spread, 500).tolist(), rng.normal(0, 1, 500).tolist()
    assert mixing(measured(x, advantages, cap=2.0)) == pytest.approx(reference(x, advantages, cap=2.0), rel=1e-9)


@given(tokens=TOKENS, cap=CAP)
@EXAMPLES
def test_the_share_lies_between_nothing_and_everything(tokens: list[tuple[float, float]], cap: float) -> None:
    assert 0 <= mixing(measured(*(list(each) for each in zip(*tokens, strict=True)), cap=cap)) <= 1


@given(tokens=TOKENS, at=st.integers(0, 30), cap=CAP)
@EXAMPLES
def test_parts_of_a_batch_add_up(tokens: list[tuple[float, float]], at: int, cap: float) -> None:
    x, advantages = (list(each) for each in zip(*tokens, strict=True))
    parts = [measured(x[part], advantages[part], cap=cap) for part in (slice(at), slice(at, None))]
    # sums of up to 30 positive terms in another order
    assert mixing({key: parts[0][key] + parts[1][key] for key in parts[0]}) == pytest.approx(
        mixing(measured(x, advantages, cap=cap)), rel=1e-12
    )


def test_padding_changes_nothing() -> None:
    row, wide = torch.tensor([[0.5, -0.3]]).double(), torch.tensor([[0.5, -0.3, math.nan, 9.0]]).double()
    ones, mask = torch.ones(1, 2), torch.tensor([[1, 1, 0, 0]])
    advantages, wide_advantages = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.0, math.nan, 5.0]])

    def sums_of(x: Tensor, mask_BT: Tensor, advantages_BT: Tensor) -> dict[str, float]:
        x_BT = log_ratio(x, rollout_BT=torch.zeros_like(x), real_BT=mask_BT)
        return moments(StepPart(x_BT, mask_BT, advantages_BT), cap=2.0)

    assert sums_of(row, ones, advantages) == sums_of(wide, mask, wide_advantages)


def test_identical_policies_get_no_correction() -> None:
    assert mixing(measured([0.0] * 9, [1.0] * 9, cap=2.0)) == 0.0


def test_a_clear_shift_with_weights_that_agree_gets_all_of_it() -> None:
    """Every weight 1/e: ESS 1, k3 = 0.37 nats, and nothing is amplified."""
    assert mixing(measured([-1.0] * 9, [1.0] * 9, cap=2.0)) == pytest.approx(1.0, abs=1e-12)


def test_weights_that_cannot_be_trusted_get_less() -> None:
    """One weight of e^10 among 1000 of about 1: ESS is 1/1000, and so is the share at most."""
    assert mixing(measured([10.0, *[0.0] * 999], [1.0] * 1000, cap=2.0)) < 0.0012


def test_amplified_gradients_get_less() -> None:
    """All weights e, below the cap: reliable and clear, but the second moment of the gradient is e^2 times as large."""
    assert mixing(measured([1.0] * 9, [1.0] * 9, cap=4.0)) == pytest.approx(math.exp(-2), rel=1e-12)


def test_no_tokens_and_no_advantages() -> None:
    assert mixing({}) == 0.0
    assert mixing(measured([-1.0], [0.0], cap=2.0)) == pytest.approx(1.0, abs=1e-12)


def test_an_advantage_that_is_not_finite_raises() -> None:
    with pytest.raises(NumericsError) as raised:
        measured([0.1, 0.1], [1.0, math.inf], cap=2.0)
    assert raised.value.message == "an advantage of this step is not finite"


@given(tokens=TOKENS, cap=CAP, share=st.floats(0, 1))
@EXAMPLES
def test_mixed_weights_lie_between_one_and_the_cut_weight(
    tokens: list[tuple[float, float]], cap: float, share: float
) -> None:
    x_BT, ones = torch.tensor([[x for x, _ in tokens]], dtype=torch.float64), torch.ones(1, len(tokens))
    weights = Adaptive(cap=cap, share=share).apply(x_BT, real_BT=ones).weights_BT[0].tolist()
    for weight, (x, _) in zip(weights, tokens, strict=True):
        cut = min(math.exp(max(-20.0, min(20.0, x))), cap)
        assert weight == pytest.approx(1 + share * (cut - 1), rel=1e-12, abs=1e-12)
        assert 0 < weight <= max(1.0, cap)

"""The mismatch of two policies against plain numpy formulas in float64."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.errors import NumericsError
from appliance.quant.mismatch import Mismatch, measure_mismatch

# Both sides compute in float64; sums of T values in another order differ by T * 2^-53 of their absolute sum. T here is
# at most 4096, so 1e-12 of the quantity; x = difference of two logarithms is the same subtraction on both sides.
RTOL = 1e-12
ATOL = 1e-15


def reference(trainer_T: np.ndarray, *, rollout_T: np.ndarray, cap: float | None) -> Mismatch:
    """The formulas of the science notes, written once more without torch and without expm1."""
    x_T = trainer_T.astype(np.longdouble) - rollout_T.astype(np.longdouble)
    w_T = np.exp(x_T)
    diff_T = np.abs(np.exp(trainer_T.astype(np.float64)) - np.exp(rollout_T.astype(np.float64)))
    return Mismatch(
        k3_kl=float(np.mean(w_T - 1 - x_T)),
        kl=float(np.mean(rollout_T.astype(np.float64) - trainer_T.astype(np.float64))),
        probs_diff_mean=float(np.mean(diff_T)),
        probs_diff_max=float(np.max(diff_T)),
        weight_mean=float(np.mean(w_T)),
        weight_std=float(np.sqrt(np.mean((w_T - np.mean(w_T)) ** 2))),
        weight_max=float(np.max(w_T)),
        ess=float(np.sum(w_T) ** 2 / (len(w_T) * np.sum(w_T**2))),
        truncated_fraction=0.0 if cap is None else sum(w > cap for w in w_T.tolist()) / len(w_T),
    )


def assert_close(found: Mismatch, wanted: Mismatch) -> None:
    for field in dataclasses.fields(Mismatch):
        one, other = getattr(found, field.name), getattr(wanted, field.name)
        assert math.isclose(one, other, rel_tol=RTOL, abs_tol=ATOL), (field.name, one, other)


@pytest.mark.parametrize("num_tokens", [1, 2, 100, 4096])
@pytest.mark.parametrize("spread", [1e-4, 0.1, 2.0])
@pytest.mark.parametrize("cap", [None, 1.0, 2.0, 8.0])
def test_every_field_equals_the_formula(num_tokens: int, spread: float, cap: float | None) -> None:
    rng = np.random.default_rng(num_tokens)
    rollout_T = -rng.exponential(1.5, num_tokens).astype(np.float32)
    trainer_T = np.minimum(rollout_T + rng.normal(0, spread, num_tokens), 0).astype(np.float32)
    found = measure_mismatch(torch.from_numpy(trainer_T), rollout_T=torch.from_numpy(rollout_T), cap=cap)
    assert_close(found, reference(trainer_T, rollout_T=rollout_T, cap=cap))


def test_a_known_case_by_hand() -> None:
    """Probabilities 1/2 and 1/4 against 1/4 and 1/2: weights 2 and 1/2."""
    measured = measure_mismatch(
        torch.tensor([0.5, 0.25], dtype=torch.float64).log(),
        rollout_T=torch.tensor([0.25, 0.5], dtype=torch.float64).log(),
        cap=1.5,
    )
    assert_close(
        measured,
        Mismatch(
            k3_kl=0.25,  # mean of 2 - 1 - ln 2 and 1/2 - 1 + ln 2
            kl=0.0,
            probs_diff_mean=0.25,
            probs_diff_max=0.25,
            weight_mean=1.25,
            weight_std=0.75,
            weight_max=2.0,
            ess=2.5**2 / (2 * 4.25),
            truncated_fraction=0.5,
        ),
    )


def test_the_sign_of_kl() -> None:
    """mean of log p_rollout - log p_trainer: positive where the rollout is more sure of what it sampled."""
    found = measure_mismatch(torch.tensor([-2.0, -3.0]), rollout_T=torch.tensor([-1.5, -1.0]), cap=None)
    assert found.kl == 1.25


def test_identical_policies_are_exactly_zero_apart() -> None:
    log_probs_T = -torch.rand(1000).mul(20)
    measured = measure_mismatch(log_probs_T, rollout_T=log_probs_T.clone(), cap=2.0)
    expected = Mismatch(
        k3_kl=0.0,
        kl=0.0,
        probs_diff_mean=0.0,
        probs_diff_max=0.0,
        weight_mean=1.0,
        weight_std=0.0,
        weight_max=1.0,
        ess=1.0,
        truncated_fraction=0.0,
    )
    assert dataclasses.asdict(measured).items() >= dataclasses.asdict(expected).items()


def test_no_cap_truncates_nothing() -> None:
    found = measure_mismatch(torch.zeros(4), rollout_T=torch.full((4,), -5.0), cap=None)
    assert found.truncated_fraction == 0.0
    assert found.weight_max == pytest.approx(math.exp(5), rel=RTOL)


def test_the_truncated_share_counts_weights_above_the_cap_only() -> None:
    """Weights 1/2, 1, 2, 4, 8 exactly or a float64 ulp beside; caps between and one at a weight of exactly 1."""
    weights_T = torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    shares = {
        cap: measure_mismatch(weights_T.log() - 10, rollout_T=torch.full((5,), -10.0), cap=cap).truncated_fraction
        for cap in (0.3, 1.0, 1.5, 3.0, 7.0, 9.0)
    }
    assert shares == {0.3: 1.0, 1.0: 0.6, 1.5: 0.6, 3.0: 0.4, 7.0: 0.2, 9.0: 0.0}


def test_weights_are_measured_before_truncation() -> None:
    trainer_T, rollout_T = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -6.0])
    with_cap = measure_mismatch(trainer_T, rollout_T=rollout_T, cap=2.0)
    without = measure_mismatch(trainer_T, rollout_T=rollout_T, cap=None)
    assert dataclasses.replace(with_cap, truncated_fraction=0.0) == without
    assert with_cap.truncated_fraction == 0.5


def test_small_differences_survive() -> None:
    """Float32 log-probabilities 1e-6 apart: k3 is x^2 / 2 = 5e-13, lost in float32 and in exp(x) - 1 - x."""
    rollout_T = torch.full((10,), -1e-3, dtype=torch.float64)
    found = measure_mismatch(rollout_T + 1e-6, rollout_T=rollout_T, cap=2.0)
    assert found.k3_kl == pytest.approx(5e-13, rel=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", ["trainer", "rollout", "both"])
def test_a_value_that_is_not_finite_raises(bad: float, side: str) -> None:
    good_T, bad_T = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, bad, -3.0])
    trainer_T = good_T if side == "rollout" else bad_T
    rollout_T = good_T if side == "trainer" else bad_T
    with pytest.raises(NumericsError) as raised:
        measure_mismatch(trainer_T, rollout_T=rollout_T, cap=2.0)
    assert raised.value.message.startswith("a log-probability of this step's rollouts is not finite")


def test_a_weight_that_overflows_raises() -> None:
    with pytest.raises(NumericsError) as raised:
        measure_mismatch(torch.tensor([-1.0]), rollout_T=torch.tensor([-800.0]), cap=2.0)
    assert raised.value.message.startswith("a log-probability of this step's rollouts is not finite")


@pytest.mark.parametrize(("trainer", "rollout"), [(0, 0), (3, 2), (2, 3), (0, 1), (1, 0)])
def test_empty_and_unequal_vectors_raise(trainer: int, rollout: int) -> None:
    with pytest.raises(ValueError) as raised:
        measure_mismatch(torch.zeros(trainer), rollout_T=torch.zeros(rollout), cap=2.0)
    assert str(raised.value).startswith(f"{trainer} and {rollout} log-probabilities for {trainer} tokens: ")


LOG_PROB = st.floats(min_value=-30, max_value=0)
PAIRS = st.lists(st.tuples(LOG_PROB, LOG_PROB), min_size=1, max_size=50)


def measure(pairs: list[tuple[float, float]], *, cap: float | None = 2.0) -> Mismatch:
    trainer, rollout = zip(*pairs, strict=True)
    return measure_mismatch(
        torch.tensor(trainer, dtype=torch.float64), rollout_T=torch.tensor(rollout, dtype=torch.float64), cap=cap
    )


@given(pairs=PAIRS)
@settings(deadline=None, max_examples=300, derandomize=True)
def test_the_bounds_of_every_field(pairs: list[tuple[float, float]]) -> None:
    """Cauchy-Schwarz: 0 < ESS <= 1. Means are rounded sums of 50 values. k3: exp(x) >= 1 + x, to an ulp of x."""
    measured = measure(pairs)
    assert measured.k3_kl >= -30 * 2.0**-52
    assert 0 < measured.ess <= 1
    assert 0 <= measured.probs_diff_mean <= measured.probs_diff_max * (1 + 1e-13) <= 1 + 1e-13
    assert 0 < measured.weight_mean <= measured.weight_max * (1 + 1e-13)
    assert measured.weight_std >= 0
    assert 0 <= measured.truncated_fraction <= 1


def assert_same_step(left: Mismatch, right: Mismatch) -> None:
    """To the rounding of sums of up to 100 terms: relative where all terms have one sign, else of the largest term; for
    a standard deviation the root of it, of a difference of squares."""
    tolerances = {"kl": 30e-13, "k3_kl": 30e-13, "weight_std": math.sqrt(1e-13) * (1 + left.weight_max)}
    for field in dataclasses.fields(Mismatch):
        tolerance = tolerances.get(field.name, 0.0)
        found, wanted = getattr(left, field.name), getattr(right, field.name)
        assert math.isclose(found, wanted, rel_tol=1e-11, abs_tol=tolerance), (field.name, found, wanted)


@given(pairs=PAIRS, seed=st.integers(0, 2**16))
@settings(deadline=None, max_examples=100, derandomize=True)
def test_the_order_of_tokens_does_not_matter(pairs: list[tuple[float, float]], seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(pairs))
    assert_same_step(measure(pairs), measure([pairs[i] for i in order]))


@given(pairs=PAIRS)
@settings(deadline=None, max_examples=100, derandomize=True)
def test_each_token_counts_the_same(pairs: list[tuple[float, float]]) -> None:
    """A step twice over has the statistics of the step."""
    assert_same_step(measure(pairs), measure(pairs * 2))

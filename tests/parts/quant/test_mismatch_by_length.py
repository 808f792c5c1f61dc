"""The mismatch of length buckets against plain loops in extended precision, and what it may not depend on."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.errors import NumericsError
from appliance.quant.mismatch import (
    FARTHEST,
    LargestDifference,
    LengthBucket,
    MismatchByLength,
    measure_by_length,
)

# Float64 sums of T terms differ from the extended ones by at most T * 2^-53 of their absolute sum; T is at most 5000
# and every statistic is a smooth function of means of terms below 30 in size.
RTOL = 1e-11
ATOL = 1e-12
# A standard deviation is a root: what the variance (at most 20 here) is off by appears as its root where it is 0.
ATOL_STD = math.sqrt(20 * 2.0**-52)

Step = list[tuple[np.ndarray, np.ndarray]]  # per sequence: trainer, rollout


def reference(step: Step, *, low: int, high: int | None, cap: float | None) -> LengthBucket | None:
    """One bucket, token after token, by the definitions and with neither expm1 nor sums per sequence."""
    inside = [i for i, (trainer, _) in enumerate(step) if max(low, 1) <= len(trainer) <= (high or math.inf)]
    if not inside:
        return None
    x = np.concatenate([step[i][0].astype(np.longdouble) - step[i][1].astype(np.longdouble) for i in inside])
    w = np.exp(x)
    gaps = [
        np.exp(-np.mean(step[i][0].astype(np.longdouble))) - np.exp(-np.mean(step[i][1].astype(np.longdouble)))
        for i in inside
    ]
    diff = np.concatenate([np.abs(np.exp(step[i][0]) - np.exp(step[i][1])) for i in inside])
    places = [(i, position) for i in inside for position in range(len(step[i][0]))]
    differences = np.abs(np.concatenate([step[i][0] - step[i][1] for i in inside]))
    sequence, position = places[int(np.argmax(differences))]
    return LengthBucket(
        min_tokens=low,
        max_tokens=high,
        num_sequences=len(inside),
        num_tokens=len(x),
        kl=float(np.mean(-x)),
        k3_kl=float(np.mean(w - 1 - x)),
        probs_diff_mean=float(np.mean(diff)),
        probs_diff_max=float(np.max(diff)),
        weight_mean=float(np.mean(w)),
        weight_std=float(np.sqrt(np.mean((w - np.mean(w)) ** 2))),
        weight_max=float(np.max(w)),
        ess=float(np.sum(w) ** 2 / (len(w) * np.sum(w**2))),
        truncated_fraction=0.0 if cap is None else sum(float(each) > cap for each in w) / len(w),
        ppl_gap=float(np.mean(gaps)),
        chi2=float(np.mean(w**2) - 1),
        largest=LargestDifference(
            nats=float(step[sequence][0][position] - step[sequence][1][position]), sequence=sequence, position=position
        ),
    )


def measure(step: Step, *, cap: float | None = 2.0, edges: tuple[int, ...] = (4, 16)) -> MismatchByLength:
    trainer, rollout = (torch.from_numpy(np.concatenate([each[side] for each in step])) for side in (0, 1))
    lengths = torch.tensor([len(each[0]) for each in step])
    return measure_by_length(trainer, rollout_T=rollout, length_S=lengths, cap=cap, edges=edges)


def assert_close(measured: LengthBucket, expected: LengthBucket | None, *, places: bool = True) -> None:
    """places: also where the largest difference sits and which lengths are meant."""
    assert expected is not None
    for field in dataclasses.fields(LengthBucket):
        value, expected_value = getattr(measured, field.name), getattr(expected, field.name)
        if isinstance(value, float):
            atol = ATOL_STD if field.name == "weight_std" else ATOL
            assert math.isclose(value, expected_value, rel_tol=RTOL, abs_tol=atol), (field.name, value, expected_value)
        elif places:
            assert value == expected_value, field.name


def make_step(lengths: list[int], *, spread: float, seed: int = 0) -> Step:
    rng = np.random.default_rng(seed)
    step = []
    for length in lengths:
        rollout = -rng.exponential(1.5, length)
        step.append((np.minimum(rollout + rng.normal(0, spread, length), 0), rollout))
    return step


@pytest.mark.parametrize("spread", [1e-6, 1e-3, 0.1, 1.0])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_every_bucket_equals_the_formula(spread: float, cap: float | None) -> None:
    step = make_step([3, 17, 4, 200, 0, 16, 1, 5, 90], spread=spread)
    measured = measure(step, cap=cap)
    assert_close(measured.whole, reference(step, low=1, high=None, cap=cap))
    assert [(each.min_tokens, each.max_tokens) for each in measured.buckets] == [(1, 4), (5, 16), (17, None)]
    for bucket in measured.buckets:
        assert_close(bucket, reference(step, low=bucket.min_tokens, high=bucket.max_tokens, cap=cap))


def test_a_known_case_by_hand() -> None:
    """Two sequences: (1/2, 1/4) against (1/4, 1/2), weights 2 and 1/2; and 1/8 against 1/4, weight 1/2."""
    half, quarter, eighth = np.log([0.5]), np.log([0.25]), np.log([0.125])
    step = [(np.append(half, quarter), np.append(quarter, half)), (eighth, quarter)]
    whole = measure(step, cap=1.5, edges=(1,)).whole
    assert whole.weight_mean == pytest.approx(1.0, rel=RTOL)
    assert whole.weight_std == pytest.approx(math.sqrt(0.5), rel=RTOL)  # of 2, 1/2, 1/2
    assert whole.chi2 == pytest.approx(0.5, rel=RTOL)  # mean of 4, 1/4, 1/4 less 1
    assert whole.ess == pytest.approx(9 / (3 * 4.5), rel=RTOL)
    assert whole.truncated_fraction == pytest.approx(1 / 3, rel=RTOL)
    assert whole.ppl_gap == pytest.approx(2.0, rel=RTOL)  # of sqrt 8 - sqrt 8 and 8 - 4
    assert whole.kl == pytest.approx(math.log(2) / 3, rel=RTOL)


def test_pairs_as_far_apart_as_is_allowed_are_measured() -> None:
    far, near = np.full(1000, -FARTHEST), np.full(1000, 0.0)
    for step in ([(far, near)], [(near, far)], [(far, near), (near, far)]):
        found = measure(step).whole
        assert all(map(math.isfinite, (found.chi2, found.ppl_gap, found.weight_std, found.ess)))


def test_the_largest_difference_is_found_where_it_was_put() -> None:
    step = make_step([5, 0, 30, 8], spread=0.01)
    step[2][0][21] -= 3.0
    step[3][0][7] += 1.0  # the same in size is not enough: the sign is kept
    measured = measure(step)
    assert (measured.whole.largest.sequence, measured.whole.largest.position) == (2, 21)
    assert measured.whole.largest.nats == pytest.approx(-3.0, abs=0.1)
    by_bucket = {each.min_tokens: (each.largest.sequence, each.largest.position) for each in measured.buckets}
    assert by_bucket[5] == (3, 7)
    assert by_bucket[17] == (2, 21)


def test_of_equal_differences_the_first_is_told() -> None:
    """Of either sign: in the second sequence two of 1/2, and one in the third."""
    flat = np.full(3, -1.0)
    step = [(flat, flat), (flat + np.array([0.0, -0.5, 0.5]), flat), (flat + np.array([0.5, 0.0, 0.0]), flat)]
    assert measure(step).whole.largest == LargestDifference(-0.5, sequence=1, position=1)


def test_a_tiny_spread_keeps_its_digits() -> None:
    """Weights 1 +- 1e-7: the variance of 1e-14 is 45 ulps of w^2 near 1, and exact to 1e-7 in (w - 1)^2."""
    rollout = np.full(1000, -1.0)
    trainer = rollout + np.tile([1e-7, -1e-7], 500)
    whole = measure([(trainer, rollout)]).whole
    assert whole.weight_std == pytest.approx(1e-7, rel=1e-6)
    assert whole.chi2 == pytest.approx(2e-14, rel=1e-3)  # 2 mean(d) = x^2, mean(d^2) = x^2
    assert whole.k3_kl == pytest.approx(5e-15, rel=1e-6)  # x^2 / 2; exp(x) - 1 has lost 1 % of it


def test_a_perplexity_that_overflows_raises() -> None:
    """Both sides so unsure that exp(800) is no number, and equally so: every weight is 1."""
    with pytest.raises(NumericsError):
        measure([(np.array([-800.0]), np.array([-800.0]))])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 800.0])
@pytest.mark.parametrize("side", [0, 1])
def test_a_value_that_is_not_finite_raises(bad: float, side: int) -> None:
    step = make_step([3, 20], spread=0.1)
    step[1][side][4] = bad if side == 0 or not math.isfinite(bad) else -bad  # a weight of e^800 either way
    with pytest.raises(NumericsError) as raised:
        measure(step)
    assert raised.value.message.startswith("a log-probability of this step's rollouts is not finite")


@pytest.mark.parametrize(("trainer", "rollout", "lengths"), [(4, 4, [3]), (4, 3, [4]), (0, 0, [0]), (0, 0, [])])
def test_lengths_that_do_not_fit_raise(trainer: int, rollout: int, lengths: list[int]) -> None:
    with pytest.raises(ValueError) as raised:
        measure_by_length(
            torch.zeros(trainer), rollout_T=torch.zeros(rollout), length_S=torch.tensor(lengths), cap=None
        )
    assert str(raised.value) == (
        f"{trainer} and {rollout} log-probabilities for {sum(lengths)} tokens: "
        "equally many are needed, and at least one"
    )


STEPS = st.builds(
    make_step,
    st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    spread=st.floats(1e-3, 1.0),
    seed=st.integers(0, 2**16),
)


@given(step=STEPS)
@settings(deadline=None, max_examples=100, derandomize=True)
def test_buckets_are_parts_of_the_whole(step: Step) -> None:
    measured = measure(step)
    assert sum(each.num_tokens for each in measured.buckets) == measured.whole.num_tokens
    assert sum(each.num_sequences for each in measured.buckets) == measured.whole.num_sequences
    joined = sum(each.k3_kl * each.num_tokens for each in measured.buckets) / measured.whole.num_tokens
    assert joined == pytest.approx(measured.whole.k3_kl, rel=RTOL, abs=ATOL)
    assert max(each.weight_max for each in measured.buckets) == measured.whole.weight_max
    assert measured.whole.largest in [each.largest for each in measured.buckets]
    assert 0 < measured.whole.ess <= 1


@given(step=STEPS, seed=st.integers(0, 2**16))
@settings(deadline=None, max_examples=100, derandomize=True)
def test_the_order_of_sequences_does_not_matter(step: Step, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(step))
    one, other = measure(step), measure([step[i] for i in order])
    for bucket, expected in zip((other.whole, *other.buckets), (one.whole, *one.buckets), strict=True):
        assert_close(bucket, expected, places=False)
        if bucket.num_tokens:  # the same token, found at its new row
            assert int(order[bucket.largest.sequence]) == expected.largest.sequence
            assert bucket.largest.position == expected.largest.position


@given(step=STEPS)
@settings(deadline=None, max_examples=50, derandomize=True)
def test_padding_does_not_matter(step: Step) -> None:
    """As the trainer takes it: a padded batch, what is not masked picked row by row, the mask's sums as lengths."""
    width = max(len(trainer) for trainer, _ in step) + 3
    padded = np.full((2, len(step), width), -999.0)
    mask = np.zeros((len(step), width), dtype=bool)
    for row, (trainer, rollout) in enumerate(step):
        padded[0, row, : len(trainer)], padded[1, row, : len(trainer)] = trainer, rollout
        mask[row, : len(trainer)] = True
    real = torch.from_numpy(mask)
    measured = measure_by_length(
        torch.from_numpy(padded[0])[real],
        rollout_T=torch.from_numpy(padded[1])[real],
        length_S=real.sum(dim=1),
        cap=2.0,
        edges=(4, 16),
    )
    assert measured == measure(step)


@given(step=STEPS)
@settings(deadline=None, max_examples=50, derandomize=True)
def test_a_step_measured_in_two_halves_adds_up(step: Step) -> None:
    """Means weigh by tokens; so do the second moments, from which spread, chi-square and ESS follow."""
    halves = [measure(half).whole for half in (step[::2], step[1::2]) if any(len(each[0]) for each in half)]
    whole = measure(step).whole

    def joined(value: str) -> float:
        return sum(getattr(half, value) * half.num_tokens for half in halves) / whole.num_tokens

    for name in ("kl", "k3_kl", "weight_mean", "chi2", "truncated_fraction"):
        assert joined(name) == pytest.approx(getattr(whole, name), rel=RTOL, abs=ATOL)
    assert whole.ess == pytest.approx(joined("weight_mean") ** 2 / (1 + joined("chi2")), rel=RTOL)

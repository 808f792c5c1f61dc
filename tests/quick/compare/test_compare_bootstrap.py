"""The paired bootstrap: does its interval hold the truth as often as it says, and does pairing matter?"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from appliance.compare import bootstrap
from appliance.compare.bootstrap import paired_interval

TRUTH = 0.1
EXPERIMENTS = 200


def tables(
    generator: np.random.Generator, *, seeds: int, problems: int, problem_sd: float, seed_sd: float, noise_sd: float
) -> tuple[np.ndarray, np.ndarray]:
    """(arm, baseline), [S, P]: problems are hard or easy for both; the arm is better by TRUTH on average."""
    hardness = generator.normal(0, 1, (1, problems))
    baseline = hardness + generator.normal(0, noise_sd, (seeds, problems))
    by_problem, by_seed = generator.normal(0, problem_sd, (1, problems)), generator.normal(0, seed_sd, (seeds, 1))
    return hardness + TRUTH + by_problem + by_seed + generator.normal(0, noise_sd, (seeds, problems)), baseline


def coverage(**spread: float) -> float:
    """The share of experiments whose 95 % interval holds TRUTH."""
    generator, covered = np.random.default_rng(1), 0
    for experiment in range(EXPERIMENTS):
        arm, baseline = tables(generator, problems=200, **spread)
        found = paired_interval(arm, baseline_SP=baseline, draws=500, seed=experiment)
        covered += found.low <= TRUTH <= found.high
    return covered / EXPERIMENTS


# Of 200 experiments at 95 %, a share below 0.90 has a probability of 0.1 % (binomial).
def test_interval_holds_the_truth_when_problems_differ() -> None:
    assert coverage(seeds=3, problem_sd=0.5, seed_sd=0.0, noise_sd=0.0) >= 0.90


def test_interval_holds_the_truth_with_noise_in_every_answer() -> None:
    assert coverage(seeds=3, problem_sd=0.5, seed_sd=0.03, noise_sd=0.5) >= 0.93


def test_interval_is_too_short_when_three_seeds_are_nearly_all_of_the_spread() -> None:
    """As the docstring says: no bootstrap knows from three seeds how far seeds spread."""
    assert 0.78 <= coverage(seeds=3, problem_sd=0.3, seed_sd=0.3, noise_sd=0.3) <= 0.91
    assert coverage(seeds=8, problem_sd=0.3, seed_sd=0.3, noise_sd=0.3) >= 0.87


def test_draws_of_few_seeds_are_stretched() -> None:
    """Two seeds that differ by 2: half of all draws take one of them twice, sqrt(2) instead of 1 from the mean."""
    arm = np.array([[0.0], [2.0]])
    found = paired_interval(arm, baseline_SP=np.zeros((2, 1)))
    assert (found.low, found.high) == pytest.approx((1 - np.sqrt(2), 1 + np.sqrt(2)))


def test_pairing_makes_the_interval_shorter() -> None:
    arm, baseline = tables(np.random.default_rng(2), seeds=3, problems=500, problem_sd=0.1, seed_sd=0.0, noise_sd=0.1)
    paired = paired_interval(arm, baseline_SP=baseline)
    unpaired = paired_interval(arm, baseline_SP=np.random.default_rng(3).permuted(baseline, axis=1))
    assert paired.mean == pytest.approx(unpaired.mean)
    assert paired.high - paired.low < 0.25 * (unpaired.high - unpaired.low)


def test_interval_of_one_seed_is_the_plain_bootstrap_of_its_problems() -> None:
    generator = np.random.default_rng(4)
    difference = generator.normal(0, 1, (1, 400))
    found = paired_interval(difference, baseline_SP=np.zeros((1, 400)))
    sd = difference.std() / np.sqrt(400)  # of the mean; the percentiles of 10 000 draws are within 3 % of 1.96 sd
    assert (found.high - found.low) / (2 * 1.96 * sd) == pytest.approx(1.0, abs=0.05)


def test_seeds_alone_spread_as_much_as_their_sample_variance_says() -> None:
    """Each seed has one difference for all problems: the spread of the draws is the standard error of S values."""
    by_seed = np.array([[0.1], [0.2], [0.6]]) * np.ones((3, 50))
    found = paired_interval(by_seed, baseline_SP=np.zeros((3, 50)), confidence=0.6826, draws=20_000)
    sd = np.array([0.1, 0.2, 0.6]).std(ddof=1) / np.sqrt(3)
    assert (found.high - found.low) / 2 == pytest.approx(sd, rel=0.15)  # ten values only: coarse percentiles


@pytest.mark.parametrize(("problems", "share"), [(1, 1.0), (10, 0.29957), (100, 0.029957)])
def test_interval_of_equal_arms_is_what_other_problems_may_hide(problems: int, share: float) -> None:
    """The rule of three: 0.95 = 1 - (1 - share)^problems, with ln(20) = 2.9957."""
    rewards = np.random.default_rng(5).integers(0, 2, (3, problems)).astype(float)
    found = paired_interval(rewards, baseline_SP=rewards)
    assert (found.mean, found.low, found.high) == (0.0, pytest.approx(-share, rel=1e-4), pytest.approx(share, rel=1e-4))


def test_interval_of_one_difference_everywhere_stays_within_the_rewards() -> None:
    found = paired_interval(np.zeros((2, 100)), baseline_SP=np.ones((2, 100)))
    assert (found.mean, found.low, found.high) == (-1.0, -1.0, pytest.approx(-1 + 2 * 0.029957, rel=1e-4))
    own = paired_interval(np.full((1, 100), 0.7), baseline_SP=np.full((1, 100), 10.7))  # other rewards than 0 to 1
    assert (own.low, own.high) == (pytest.approx(-10), pytest.approx(-10 + 20 * 0.029957, rel=1e-4))


def test_the_same_rewards_give_the_same_interval() -> None:
    arm, baseline = np.eye(3), np.ones((3, 3))
    assert paired_interval(arm, baseline_SP=baseline) == paired_interval(arm, baseline_SP=baseline)


def test_many_problems_are_drawn_in_parts_and_give_the_same_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    arm, baseline = np.random.default_rng(6).integers(0, 2, (2, 3, 100_000)).astype(float)
    tracemalloc.start()
    interval = paired_interval(arm, baseline_SP=baseline, draws=60)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 64 << 20
    monkeypatch.setattr(bootstrap, "_VALUES_AT_ONCE", 60 * 100_000)
    at_once = paired_interval(arm, baseline_SP=baseline, draws=60)
    assert (interval.low, interval.high) == (
        pytest.approx(at_once.low, rel=1e-12),
        pytest.approx(at_once.high, rel=1e-12),
    )


@pytest.mark.parametrize(
    ("arm", "baseline", "message"),
    [
        (np.ones((2, 3)), np.ones((3, 2)), "two equal tables of seeds by problems are needed, got (2, 3) and (3, 2)"),
        (np.ones(3), np.ones(3), "two equal tables of seeds by problems are needed, got (3,) and (3,)"),
        (np.ones((0, 3)), np.ones((0, 3)), "two equal tables of seeds by problems are needed, got (0, 3) and (0, 3)"),
        (np.array([[np.nan]]), np.array([[1.0]]), "a reward is not finite"),
    ],
)
def test_tables_that_cannot_be_paired_are_refused(arm: np.ndarray, baseline: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        paired_interval(arm, baseline_SP=baseline)
    assert str(raised.value) == message

"""The layers that stay in BF16 for a budget: chosen by an estimate, decided by measurements."""

from __future__ import annotations

import dataclasses

import pytest

from appliance.quant.choice import Candidate, candidates_of, choose_fewest, meet_budget, share_in_bf16
from appliance.quant.files import Predicted

PREDICTED = Predicted(tokens=100, kl=0.02, k3_kl=0.02, kl_tokens=0.02, probs_diff_mean=0.01, weight_max=2.0)
WORST = Candidate(("worst",), 0.009, 100)
WIDE = Candidate(("wide",), 0.008, 800)
SMALL = Candidate(("q", "k", "v"), 0.002, 10)
LITTLE = Candidate(("little",), 0.001, 90)
ALL = (WIDE, LITTLE, WORST, SMALL)


def measured_by(factors: dict[str, float], trials: list[frozenset[str]] | None = None):
    """The mismatch that layers would have: the sum over those that are not kept."""

    def measure(in_bf16: frozenset[str]) -> Predicted:
        if trials is not None:
            trials.append(in_bf16)
        left = sum(kl for name, kl in factors.items() if name not in in_bf16)
        return dataclasses.replace(PREDICTED, kl=left)

    return measure


def test_layers_are_kept_by_what_each_multiplication_takes_off() -> None:
    assert choose_fewest(ALL, kl=0.02, budget=0.0181) == (SMALL,)
    assert choose_fewest(ALL, kl=0.02, budget=0.0091) == (SMALL, WORST)
    assert choose_fewest(ALL, kl=0.02, budget=0.02) == ()
    assert set(choose_fewest(ALL, kl=0.02, budget=0.0)) == set(ALL)


def test_a_layer_that_a_later_one_makes_needless_goes() -> None:
    assert choose_fewest((WORST, SMALL, WIDE), kl=0.019, budget=0.0105) == (WORST,)


def test_what_is_kept_by_ignore_is_no_candidate_and_experts_are_one() -> None:
    half = {"layer": ["mlp.experts"], "contribution": 0.01, "multiplications": 8, "stays_in_bf16": False}
    none = {"layer": ["x"], "contribution": None, "multiplications": 9, "stays_in_bf16": False}
    assert candidates_of([half, half, none]) == [Candidate(("mlp.experts",), 0.01, 16)]
    assert share_in_bf16([SMALL], candidates=[SMALL, LITTLE]) == 0.1


def test_the_choice_is_measured_and_meets_the_budget() -> None:
    trials: list[frozenset[str]] = []
    exact = {"worst": 0.009, "wide": 0.008, "q": 0.002, "little": 0.001}
    chosen, predicted = meet_budget(ALL, all_quantised=PREDICTED, budget=0.0105, measure=measured_by(exact, trials))
    assert chosen == frozenset({"worst", "q", "k", "v"})
    assert predicted.kl == pytest.approx(0.009)
    assert trials == [chosen]


def test_an_estimate_that_is_too_low_is_corrected_by_its_measurement() -> None:
    """Together the layers do twice what their contributions say once the worst one is kept."""
    trials: list[frozenset[str]] = []
    real = {"worst": 0.001, "wide": 0.015, "q": 0.002, "little": 0.002}
    kept, predicted = meet_budget(ALL, all_quantised=PREDICTED, budget=0.0101, measure=measured_by(real, trials))
    assert predicted.kl <= 0.0101 and "wide" in kept
    assert 1 < len(trials) <= 3


def test_a_budget_that_no_choice_meets_ends_after_three_with_the_nearest() -> None:
    """The layers with most of the mismatch have the smallest contributions. A trial is a pass over the text."""
    layers = [Candidate((f"{number:02}",), 0.001 / (number + 1), 1) for number in range(40)]
    real = {f"{number:02}": 0.02 * ((number + 1) ** 4 - number**4) / 40**4 for number in range(40)}
    trials: list[frozenset[str]] = []
    kept_layers, predicted = meet_budget(
        layers, all_quantised=PREDICTED, budget=0.0105, measure=measured_by(real, trials)
    )
    assert len(trials) == 3
    assert kept_layers == max(trials, key=len)
    assert predicted.kl == measured_by(real)(kept_layers).kl > 0.0105


def test_three_trials_are_measured_where_each_is_far_below_the_budget() -> None:
    """A trial is a pass over the text, so that a budget takes at most three times as long as a profile without one."""
    layers = [Candidate((str(number),), 0.0005, 10) for number in range(40)]
    trials: list[frozenset[str]] = []

    def measure(in_bf16: frozenset[str]) -> Predicted:
        trials.append(in_bf16)
        return dataclasses.replace(PREDICTED, kl=0.02 * (1 - len(in_bf16) / 40) ** 8)

    kept, predicted = meet_budget(layers, all_quantised=PREDICTED, budget=0.004, measure=measure)
    assert len(trials) == 3 and kept == min(trials, key=len) and predicted.kl <= 0.004


def test_of_the_choices_that_meet_the_budget_the_cheapest_one_counts() -> None:
    """The first proposal keeps a layer more than it takes."""
    trials: list[frozenset[str]] = []
    real = {"worst": 0.0125, "wide": 0.006, "q": 0.001, "little": 0.0005}
    kept, predicted = meet_budget(ALL, all_quantised=PREDICTED, budget=0.0105, measure=measured_by(real, trials))
    assert trials[0] == frozenset({"worst", "q", "k", "v"})
    assert kept == trials[1] == frozenset({"worst"})
    assert predicted.kl == pytest.approx(0.0075)


def test_a_first_choice_that_measures_far_below_the_budget_ends_in_the_fewest_layers() -> None:
    """Ten layers have nine times the mismatch of the others, and their contributions do not say so. The
    mismatch with none kept is known exactly, and a trial does not change it."""
    layers = [Candidate((f"{number:02}",), 0.001, 1) for number in range(20)]
    real = {f"{number:02}": 0.0018 if number < 10 else 0.0002 for number in range(20)}
    trials: list[frozenset[str]] = []
    kept, predicted = meet_budget(layers, all_quantised=PREDICTED, budget=0.0105, measure=measured_by(real, trials))
    assert [len(trial) for trial in trials] == [11, 7, 6]
    assert (len(kept), predicted.kl) == (6, pytest.approx(0.0092))


def test_a_first_choice_that_takes_nothing_off_does_not_end_in_every_layer_kept() -> None:
    """With all kept nothing is left, which is known exactly too."""
    layers = [Candidate((f"{number:02}",), 0.001, 1) for number in range(20)]
    real = {f"{number:02}": 0.0 if number < 11 else 0.02 / 9 for number in range(20)}
    trials: list[frozenset[str]] = []
    kept, predicted = meet_budget(layers, all_quantised=PREDICTED, budget=0.0105, measure=measured_by(real, trials))
    assert [len(trial) for trial in trials] == [11, 16]
    assert (len(kept), predicted.kl) == (16, pytest.approx(0.08 / 9))

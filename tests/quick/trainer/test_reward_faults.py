"""What responses without a grade cost, and when they stop a run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from appliance.errors import GuardStop
from appliance.tasks.grading import Fault, Graded
from appliance.trainer.rewards import RewardFaults, fill_neutral, neutral_parts, reward_means

FAILED = Graded(0.0, Fault.TIMED_OUT, "no grade after 30 s")


def neutralised(graded: list[Graded]) -> list[float]:
    return fill_neutral((each.accuracy for each in graded), known=[each.fault is None for each in graded])


def test_fault_gets_the_mean_of_its_group_so_that_its_advantage_is_0() -> None:
    accuracies = neutralised([Graded(1.0), FAILED, Graded(0.0), Graded(1.0), FAILED])
    assert accuracies == [1.0, 2 / 3, 0.0, 1.0, 2 / 3]
    mean = sum(accuracies) / len(accuracies)
    assert abs(mean - 2 / 3) < 1e-15  # of the three that were graded; float64 rounding of five terms
    assert abs(accuracies[1] - mean) < 1e-15


def test_group_without_a_grade_is_equal_and_teaches_nothing() -> None:
    assert neutralised([FAILED, FAILED]) == [0.0, 0.0]


def test_grades_stay_as_they_are() -> None:
    assert neutralised([Graded(1.0), Graded(0.25)]) == [1.0, 0.25]


def end(faults: RewardFaults, *, graded: int, last: Graded | None = FAILED, **kinds: int) -> int:
    counted = Counter({Fault[name.upper()]: number for name, number in kinds.items()})
    return faults.end("step 3", pool=SimpleNamespace(graded=graded, faults=counted, last_fault=last))


def test_failures_are_told_with_the_newest_reason(tmp_path: Path) -> None:
    faults = RewardFaults(tmp_path, most=0.5)
    assert end(faults, graded=64, timed_out=2, raised=1) == 3
    (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (event["kind"], event["what"], event["why"], event["failed"], event["graded"]) == (
        "reward",
        "3 of 64 rewards of step 3 failed (1 raised, 2 timed out)",
        "no grade after 30 s",
        3,
        64,
    )


def test_each_step_counts_its_own(tmp_path: Path) -> None:
    faults = RewardFaults(tmp_path, most=0.5)
    assert end(faults, graded=64, raised=3) == 3
    assert end(faults, graded=128, raised=3) == 0
    assert end(faults, graded=192, raised=4) == 1
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 2


def test_no_failures_are_no_news(tmp_path: Path) -> None:
    assert end(RewardFaults(tmp_path, most=0.0), graded=64, last=None) == 0
    assert not (tmp_path / "events.jsonl").exists()


def test_share_that_is_just_allowed_goes_on_and_one_more_stops(tmp_path: Path) -> None:
    assert end(RewardFaults(tmp_path, most=0.125), graded=64, raised=8) == 8
    with pytest.raises(GuardStop) as raised:
        end(RewardFaults(tmp_path, most=0.125), graded=64, raised=9)
    assert raised.value.message == "9 of 64 rewards of step 3 failed (9 raised), more than 12%"
    assert raised.value.hint == "the last one: no grade after 30 s; guard.reward_failures says how many may fail"
    assert raised.value.exit_code == 6


def test_equal_grades_with_a_fault_stay_equal_to_the_last_bit() -> None:
    """DAPO's filter looks for groups without any spread; three times 0.1 over three is not 0.1 in floats."""
    assert (0.1 + 0.1 + 0.1) / 3 != 0.1
    assert neutralised([Graded(0.1), Graded(0.1), FAILED, Graded(0.1)]) == [0.1] * 4


def test_rewards_of_any_size_have_a_mean() -> None:
    assert neutralised([Graded(1e15), Graded(-3e15), FAILED]) == [1e15, -3e15, -1e15]


def test_a_fault_has_the_means_of_its_groups_rewards() -> None:
    graded = [Graded(1.0, parts=(("a", 1.0), ("b", 4.0))), FAILED, Graded(0.5, parts=(("a", 0.5),))]
    assert neutral_parts(graded) == [{"a": 1.0, "b": 4.0}, {"a": 0.75, "b": 4.0}, {"a": 0.5}]
    assert neutral_parts([FAILED, FAILED]) == [{}, {}]


def test_the_mean_of_a_reward_is_over_the_samples_to_which_it_applies() -> None:
    parts = [{"a": 1.0}, {"a": 0.0, "b": -5.0}, {}]
    assert reward_means(parts, names=("b", "a", "c")) == {"reward/b": -5.0, "reward/a": 0.5, "reward/c": None}

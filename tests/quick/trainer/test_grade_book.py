"""Grades from the rollouts' thread to the trainer's, and until when they are remembered."""

from __future__ import annotations

import math

import pytest

from appliance.tasks.grading import Fault, Graded
from appliance.trainer.grade_book import GradeBook

FAULT = Graded(0.0, Fault.RAISED)


def graded(right: float, short: float | None = None) -> Graded:
    return Graded(right, parts=(("right", right), *(() if short is None else (("short", short),))))


@pytest.mark.parametrize("validate", [False, True])
def test_samples_without_a_grade_are_known_until_their_step_is_over(validate: bool) -> None:
    grades = GradeBook()
    grades.add("a_b", [Graded(1.0), FAULT], step=1, validate=validate)
    grades.add("c", [FAULT, Graded(1.0)], step=2, validate=validate)
    keys = ["c_0_0", "c_1_0", "a_b_0_0", "a_b_1_0", "pad_0_0"]
    assert grades.take_ungraded(keys, step=2) == (set() if validate else {0, 3})
    assert grades.take_ungraded(keys, step=3) == (set() if validate else {0})
    assert grades.take_ungraded(keys, step=3) == set()


def test_what_no_step_trained_on_is_forgotten_with_the_next() -> None:
    grades = GradeBook(rewards=("right", "short"))
    for step in (4, 5):
        grades.add(f"t{step}", [graded(1.0)], step=step, validate=False)
        assert grades.reward_means([f"t{step}_0_0"], step=step) == {"reward/right": 1.0, "reward/short": None}
    assert grades.reward_means(["t4_0_0"], step=6) == {"reward/right": None, "reward/short": None}


def test_rows_that_only_pad_the_batch_have_no_parts() -> None:
    """Neither has a sample that the prompt does not have."""
    grades = GradeBook(rewards=("right", "short"))
    grades.add("a", [graded(1.0, 0.5), FAULT], step=1, validate=False)
    parts = grades.reward_parts(["a_1_0", "pad_0_0", "a_0_0", "a_2_0"])
    assert parts["right"][2] == 1.0 and parts["short"][2] == 0.5
    assert [math.isnan(value) for value in parts["right"]] == [True, True, False, True]
    assert grades.reward_means(["pad_0_0", "a_0_0"], step=1) == {"reward/right": 1.0, "reward/short": 0.5}


def test_without_rewards_of_the_users_own_no_grade_is_remembered() -> None:
    grades = GradeBook()
    grades.add("a", [Graded(1.0)], step=1, validate=False)
    assert grades.reward_means(["a_0_0"], step=1) == {} and grades.reward_parts(["a_0_0"]) == {}
    assert grades._by_prompt == {}


def test_a_validation_replaces_the_one_before_and_counts_the_first_set() -> None:
    grades = GradeBook(val_sets=("hard", "easy"))
    for accuracy in (0.0, 1.0):
        grades.begin_validation()
        for uid in ("h", "e"):
            grades.add(uid, [Graded(accuracy, parts=(("right", accuracy),))], step=2, validate=True)
        grades.count_validated(["h"], val_set="hard")
        grades.count_validated(["e"], val_set="easy")
    assert grades.set_metrics() == {
        "val/hard/avg@1": 1.0,
        "val/hard/pass@1": 1.0,
        "val/easy/avg@1": 1.0,
        "val/easy/pass@1": 1.0,
    }
    assert next(iter(grades.set_metrics())) == "val/hard/avg@1" and grades.num_validated == 2
    assert grades._by_prompt == {}


def test_a_single_validation_is_only_counted() -> None:
    grades = GradeBook()
    grades.begin_validation()
    grades.add("v", [Graded(1.0)], step=2, validate=True)
    grades.count_validated(["v"])
    assert grades.num_validated == 1 and grades.set_metrics() == {} and grades._by_prompt == {}


def test_rewards_of_prompts_are_taken_once() -> None:
    grades = GradeBook()
    for mean in (1.0, -1.0):
        grades.add_prompt_reward(mean)
    assert grades.take_prompt_rewards() == [1.0, -1.0]
    assert grades.take_prompt_rewards() == []

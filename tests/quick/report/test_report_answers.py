"""Table of the answers before and after, at the end of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.guard.policy import MismatchBounds
from appliance.launch.outcome import DONE
from appliance.launch.train import _tell
from appliance.record.samples import Sample, StepSamples, append_samples
from appliance.record.state import RunState
from appliance.report.answers import answers_table

PROBLEMS = (("Tom has 7 apples and gets 5 more.", "12"), ("What is 3 eggs plus 4 eggs?", "7"))


def sample_of(problem: tuple[str, str], response: str, *, finished: bool = True) -> Sample:
    prompt = f"system\nAnswer with the number alone.\nuser\n{problem[0]}\nassistant\n"
    accuracy = float(response == problem[1])
    return Sample(prompt, response, problem[1], accuracy, None, tokens=3, finished=finished)


def validated(step: int, *samples: Sample) -> StepSamples:
    return StepSamples(step, "int8", validation=samples)


BEFORE = validated(0, sample_of(PROBLEMS[0], "Tom has 7\napples, so", finished=False), sample_of(PROBLEMS[1], "7"))
BETWEEN = validated(10, sample_of(PROBLEMS[0], "9"), sample_of(PROBLEMS[1], "9"))
AFTER = validated(20, sample_of(PROBLEMS[1], "7"), sample_of(PROBLEMS[0], "12"))


def test_the_first_and_the_last_answers_side_by_side() -> None:
    training = StepSamples(15, "int8", training=(sample_of(PROBLEMS[0], "1"),))
    assert answers_table([BEFORE, BETWEEN, training, AFTER], is_graded=True).splitlines() == [
        "a validation problem               before                           after step 20",
        "Tom has 7 apples and gets 5 more.  Tom has 7 apples, so …  (wrong)  12  (right)",
        "What is 3 eggs plus 4 eggs?        7  (right)                       7  (right)",
    ]


def test_rewards_of_the_user_s_own_are_shown_as_numbers() -> None:
    earned = replace(sample_of(PROBLEMS[0], "12"), accuracy=1.0475)
    no_grade = replace(sample_of(PROBLEMS[1], "7"), accuracy=None)
    (_, *rows) = answers_table([BEFORE, validated(20, earned, no_grade)], is_graded=False).splitlines()
    assert rows == [
        "Tom has 7 apples and gets 5 more.  Tom has 7 apples, so …  (reward 0)  12  (reward 1.05)",
        "What is 3 eggs plus 4 eggs?        7  (reward 1)                       7",
    ]


def test_nothing_without_two_validations_of_the_same_problems() -> None:
    other = validated(20, sample_of(("What is 1 plus 1?", "2"), "2"))
    assert [answers_table(samples, is_graded=True) for samples in ([], [BEFORE], [BEFORE, other])] == ["", "", ""]


def test_a_run_that_was_not_validated_before_says_after_which_step() -> None:
    assert "after step 10" in answers_table([BETWEEN, AFTER], is_graded=True).splitlines()[0]


def test_long_texts_keep_their_beginning_and_their_end() -> None:
    problem = ("What? " * 60 + "End.", "1")
    before = validated(0, sample_of(problem, "so " * 90 + "the answer is 1"), sample_of(PROBLEMS[0], "5"))
    after = validated(9, sample_of(problem, "1"), sample_of(PROBLEMS[0], "12"))
    (_, row, _) = answers_table([before, after], is_graded=True).splitlines()
    assert len(row) < 250 and row.startswith("What? What?") and "What? End." in row and "the answer is 1" in row


def test_one_problem_alone_is_shown_whole() -> None:
    table = answers_table([validated(0, BEFORE.validation[0]), validated(9, AFTER.validation[1])], is_graded=True)
    assert "system Answer with the number alone. user Tom has 7 apples" in table


@pytest.mark.parametrize(
    ("json_mode", "quiet", "is_shown"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_a_run_ends_with_its_answers_for_people(
    tmp_path: Path,
    small_plan: Callable,
    capsys: pytest.CaptureFixture[str],
    json_mode: bool,
    quiet: bool,
    is_shown: bool,
) -> None:
    plan = small_plan(tmp_path)
    Path(plan.run_dir).mkdir()
    for samples in (BEFORE, AFTER):
        append_samples(Path(plan.run_dir), samples)
    _tell(plan, RunState(20, MismatchBounds()), outcome=DONE, seconds=9.0, json_mode=json_mode, quiet=quiet)
    printed = capsys.readouterr()
    assert (answers_table([BEFORE, AFTER], is_graded=True) in printed.err) == is_shown
    assert "a validation problem" not in printed.out

"""Several validations: which problems they are, and what their samples say."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from plans import make_files, make_own_task, make_reward, make_task

from appliance.errors import RecipeError
from appliance.settings.sections import ValSet
from appliance.tasks import own_task
from appliance.tasks.built_in import arithmetic
from appliance.tasks.grading import Fault, Graded, pass_at, sample_counts, set_metrics
from appliance.tasks.library import splits_of
from appliance.tasks.rows import Problem
from appliance.tasks.task import PromptLimit, Splits, TaskDefinition

RIGHT, HALF, WRONG = Graded(1.5, parts=(("math", 1.0), ("short", 0.5))), Graded(0.5), Graded(0.0)


def val_set(name: str, *, file: Path | None = None, size: int = 0, samples: int = 1) -> tuple[str, ValSet]:
    return name, ValSet(file=str(file) if file else None, size=size, samples=samples, temperature=0.0)


@pytest.fixture
def task() -> TaskDefinition:
    return own_task.task(make_own_task(make_reward("exact"), prompt="q", truth="a"), files=make_files())


def file_of(folder: Path, name: str, *, first: int, count: int) -> Path:
    path = folder / f"{name}.jsonl"
    rows = [{"q": f"problem {number}", "a": str(number)} for number in range(first, first + count)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def splits(task: TaskDefinition, train: Path | None, *val_sets: tuple[str, ValSet], train_size: int = 0) -> Splits:
    train_file = str(train) if train else None
    return task.splits(make_task(train_file=train_file, train_size=train_size, val_sets=dict(val_sets)))


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_draws_with_one_that_passes(samples: int) -> None:
    """Against all draws of k of n samples, counted."""
    for passed, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        draws = list(itertools.combinations([True] * passed + [False] * (samples - passed), k))
        share = sum(map(any, draws)) / len(draws)
        assert pass_at(k, samples=samples, passed=passed) == pytest.approx(share, abs=1e-15)


def test_pass_at_k_of_many_samples_is_finite_and_exact_at_the_ends() -> None:
    assert pass_at(512, samples=1024, passed=0) == 0.0
    assert pass_at(512, samples=1024, passed=600) == 1.0
    assert pass_at(1, samples=1024, passed=256) == 0.25


def test_tries_are_powers_of_two_and_the_number_of_samples() -> None:
    assert [list(sample_counts(samples)) for samples in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_the_mean_is_over_problems_and_samples_and_what_passes_by_the_first_reward() -> None:
    """Two problems of two samples: one of four passes. The second reward of 1 says nothing, a fault is 0 and fails."""
    generous = Graded(1.0, parts=(("math", 0.0), ("short", 1.0)))
    found = set_metrics("aime", [[RIGHT, generous], [HALF, Graded(0.0, Fault.RAISED)]], first_reward="math")
    assert found == {"val/aime/avg@2": 0.75, "val/aime/pass@1": 0.25, "val/aime/pass@2": 0.5}
    assert next(iter(found)) == "val/aime/avg@2"


def test_a_reward_that_does_not_apply_does_not_pass_and_that_of_a_built_in_task_needs_no_name() -> None:
    other = Graded(1.0, parts=(("short", 1.0),))
    assert set_metrics("a", [[other]], first_reward="math")["val/a/pass@1"] == 0.0
    assert set_metrics("a", [[other]], first_reward="")["val/a/pass@1"] == 1.0


def test_sets_of_files_and_one_that_is_held_out_share_nothing_with_training(
    tmp_path: Path, task: TaskDefinition
) -> None:
    """Two files with common problems, which are 25..54 of 0..39 to train on."""
    first, second = file_of(tmp_path, "a", first=30, count=20), file_of(tmp_path, "b", first=25, count=30)
    train = file_of(tmp_path, "train", first=0, count=40)
    sets = (val_set("train", file=first, size=12), val_set("held", size=5), val_set("b", file=second))
    problem_sets = splits(task, train, *sets)
    assert list(problem_sets.val_sets) == ["train", "held", "b"] and problem_sets.val == []
    assert [each.truth for each in problem_sets.val_sets["train"]] == [str(number) for number in range(30, 42)]
    assert len(problem_sets.val_sets["b"]) == 30 and len(problem_sets.val_sets["held"]) == 5
    seen = {each.prompt for problems in problem_sets.val_sets.values() for each in problems}
    assert len(problem_sets.train) == 20 and not seen & {each.prompt for each in problem_sets.train}
    assert problem_sets.notes == ("train: 15 problems are in the validation data as well and are left out",)
    assert splits(task, train, *sets) == problem_sets


def test_one_set_that_is_held_out_is_the_validation_without_sets(tmp_path: Path, task: TaskDefinition) -> None:
    train = file_of(tmp_path, "train", first=0, count=40)
    plain = task.splits(make_task(train_file=str(train), val_size=8))
    made = splits(task, train, val_set("held", size=8))
    assert (made.train, made.val_sets) == (plain.train, {"held": plain.val})


def short(tokens: int) -> PromptLimit:
    """A token per character."""
    return PromptLimit(tokens, lambda problem: len(problem.prompt))


def test_long_prompts_count_for_no_size(tmp_path: Path, task: TaskDefinition) -> None:
    """Of 200 problems the first 100 are short: `problem 99` has ten characters."""
    train = file_of(tmp_path, "train", first=0, count=200)
    limit = short(10)
    plan = make_task(train_file=str(train), train_size=64, val_size=20)
    problem_sets = task.splits(plan, limit=limit)
    assert (len(problem_sets.train), len(problem_sets.val)) == (64, 20)
    assert {each.truth for each in (*problem_sets.train, *problem_sets.val)} <= {str(number) for number in range(100)}
    assert not {each.prompt for each in problem_sets.train} & {each.prompt for each in problem_sets.val}
    assert limit.notes == ("100 of 200 problems have prompts of more than 10 tokens and are left out",)
    assert task.splits(plan, limit=short(10)) == problem_sets
    alone = task.splits(plan.replace(train_file=str(file_of(tmp_path, "short", first=0, count=100))))
    assert (alone.train, alone.val) == (problem_sets.train, problem_sets.val)
    assert task.splits(plan, limit=short(11)) == task.splits(plan)  # where none is too long


def test_sizes_that_short_prompts_do_not_have_are_refused(tmp_path: Path, task: TaskDefinition) -> None:
    train, file = file_of(tmp_path, "train", first=0, count=20), file_of(tmp_path, "a", first=95, count=10)
    sets = (val_set("a", file=file, size=6), val_set("held", size=10))
    with pytest.raises(RecipeError) as caught:
        task.splits(make_task(train_file=str(train), val_sets=dict(sets)), limit=short(9))
    assert caught.value.problems == [
        (
            f"task.val_sets.held.size: 10 of the 10 problems of at most 9 tokens in {train} leave no "
            "problem for training or none for validation",
            "use 1 to 9, or give task.val_sets.held.file",
        ),
    ]
    with pytest.raises(RecipeError) as caught:
        task.splits(make_task(train_file=str(train), val_sets=dict(sets)), limit=short(10))
    message = f"task.val_sets.a.size: 6 is more than the 5 problems of at most 10 tokens in {file}"
    assert caught.value.problems == [(message, "use 1 to 5, or 0 for all of them")]
    with pytest.raises(RecipeError) as caught:
        task.splits(make_task(train_file=str(train), val_sets=dict(sets[:1])), limit=short(9))
    message = "task.max_prompt_tokens: 9 leaves 10 training and 0 validation (a) problems"
    assert caught.value.problems == [(message, "raise it")]


def test_made_problems_that_are_too_long_are_left_out() -> None:
    """By their first operand, 10 to 99: all of difficulty 2 are of one length."""

    def first(problem: Problem) -> int:
        return int(problem.prompt[:2])

    plan = make_task(train_size=64, val_size=32)
    found, shorter = arithmetic.TASK.splits(plan), arithmetic.TASK.splits(plan, limit=PromptLimit(50, first))
    assert 0 < len(shorter.train) < 64 and 0 < len(shorter.val) < 32
    assert shorter.train == [each for each in found.train if first(each) <= 50]
    message = (
        f"task.train_size: 64 is more than the {len(shorter.train)} problems of at most 50 tokens there are to train on"
    )
    with pytest.raises(RecipeError) as caught:
        splits_of(plan, files=make_files(), limit=PromptLimit(50, first))
    assert caught.value.problems == [(message, "lower it, or use 0 for all of them")]


def test_sizes_that_files_do_not_have_are_all_said(tmp_path: Path, task: TaskDefinition) -> None:
    train, file = (file_of(tmp_path, name, first=first, count=6) for name, first in (("train", 0), ("a", 20)))
    other = file_of(tmp_path, "b", first=50, count=3)
    with pytest.raises(RecipeError) as caught:
        splits(task, train, val_set("a", file=file, size=7), val_set("b", file=other, size=4), val_set("c", size=6))
    assert caught.value.problems == [
        (f"task.val_sets.a.size: 7 is more than the 6 problems in {file}", "use 1 to 6, or 0 for all of them"),
        (f"task.val_sets.b.size: 4 is more than the 3 problems in {other}", "use 1 to 3, or 0 for all of them"),
        (
            f"task.val_sets.c.size: 6 of the 6 problems in {train} leave no problem for training or none "
            "for validation",
            "use 1 to 5, or give task.val_sets.c.file",
        ),
    ]


def test_bad_rows_of_every_file_are_said_at_once(tmp_path: Path, task: TaskDefinition) -> None:
    train, file = tmp_path / "train.jsonl", tmp_path / "a.jsonl"
    train.write_text('{"q": "1"}\n')
    file.write_text('{"a": "1"}\n')
    with pytest.raises(RecipeError) as caught:
        splits(task, train, val_set("a", file=file))
    assert [message for message, _ in caught.value.problems] == [
        f"{train}:1: the field `a` is missing: the row has `q`",
        f"{file}:1: the field `q` is missing: the row has `a`",
    ]


def test_a_task_that_makes_its_problems_makes_those_of_its_set() -> None:
    plain = arithmetic.TASK.splits(make_task(train_size=64, val_size=32))
    made = splits(arithmetic.TASK, None, val_set("unseen", size=32), train_size=64)
    assert (made.train, made.val_sets, made.val) == (plain.train, {"unseen": plain.val}, [])

"""The built-in task: pools that never meet, an exact reward, and seeds that only draw and order."""

from __future__ import annotations

import pytest
from finding_texts import texts

from appliance.errors import RecipeError
from appliance.tasks.built_in.arithmetic import Pool, check, pairs, pool_of, problem, score, splits
from appliance.tasks.rows import Problem


def operands(problems: list[Problem]) -> set[frozenset[int]]:
    """Problems without the order of their operands."""
    return {frozenset(map(int, each.prompt.split("+"))) for each in problems}


def test_problem_is_a_short_prompt_and_its_sum() -> None:
    assert problem(47, 85) == Problem(prompt="47+85", truth="132")


def test_pools_cover_every_two_digit_problem_once() -> None:
    every = [pair for pool in Pool for pair in pairs(pool, difficulty=2)]
    assert len(every) == len(set(every)) == 90 * 90


def test_pools_keep_a_problem_and_its_mirror_together() -> None:
    assert all(pool_of(a, b) is pool_of(b, a) for a in range(10, 100) for b in range(10, 100))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("difficulty", [2, 3])
def test_warm_start_training_and_validation_share_no_problem(seed: int, difficulty: int) -> None:
    made = splits(difficulty=difficulty, seed=seed, train_size=0, val_size=0)
    warm = {frozenset(pair) for pair in pairs(Pool.WARM_START, difficulty=difficulty)}
    train, val = operands(made.train), operands(made.val)
    assert not warm & train
    assert not warm & val
    assert not train & val


@pytest.mark.parametrize("seeds", [(0, 1), (1, 2)])
def test_no_seed_trains_on_what_another_validates(seeds: tuple[int, int]) -> None:
    first, second = (splits(difficulty=2, seed=seed, train_size=0, val_size=0) for seed in seeds)
    assert not operands(first.train) & operands(second.val)


def test_pool_sizes_serve_the_shipped_recipe() -> None:
    sizes = {pool: len(pairs(pool, difficulty=2)) for pool in Pool}
    assert sizes == {Pool.WARM_START: 5671, Pool.TRAIN: 1431, Pool.VALIDATION: 998}


def test_splits_are_the_same_for_the_same_seed_and_differ_for_another() -> None:
    by_seed = [splits(difficulty=2, seed=seed, train_size=100, val_size=500) for seed in (0, 0, 1)]
    assert by_seed[0] == by_seed[1]
    assert by_seed[0].train != by_seed[2].train
    assert set(by_seed[0].val) != set(by_seed[2].val)
    assert (len(by_seed[0].train), len(by_seed[0].val)) == (100, 500)


def test_every_truth_is_the_sum() -> None:
    made = splits(difficulty=4, seed=3, train_size=200, val_size=200)
    assert all(sum(map(int, each.prompt.split("+"))) == int(each.truth) for each in made.train + made.val)
    assert all(len(each.prompt) == 9 for each in made.train)


def test_splits_refuse_sizes_above_the_pools_all_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        splits(difficulty=2, seed=0, train_size=5000, val_size=1000)
    hint = "lower it, or raise task.difficulty"
    assert caught.value.problems == [
        ("task.train_size: 5000 is more than the 1431 train problems of difficulty 2", hint),
        (
            "task.val_size: 1000 is more than the 998 validation problems of difficulty 2",
            "lower it, or lower task.train_size to leave more for validation; or raise task.difficulty",
        ),
    ]


def test_a_large_validation_goes_on_with_what_training_leaves() -> None:
    problem_sets = splits(difficulty=2, seed=0, train_size=192, val_size=2000)
    small = splits(difficulty=2, seed=0, train_size=192, val_size=998)
    assert (len(problem_sets.train), len(problem_sets.val), len(set(problem_sets.val))) == (192, 2000, 2000)
    assert problem_sets.val[:998] == small.val
    assert not operands(problem_sets.train) & operands(problem_sets.val)
    assert not {frozenset(pair) for pair in pairs(Pool.WARM_START, difficulty=2)} & operands(problem_sets.val)


def test_a_validation_above_what_training_leaves_is_refused_with_the_number_that_there_is() -> None:
    faults = check(difficulty=2, seed=0, train_size=192, val_size=2074)
    what = "2073 validation problems of difficulty 2, the 1075 that task.train_size leaves included"
    hint = "lower it, or lower task.train_size to leave more for validation; or raise task.difficulty"
    assert texts(faults) == [(f"task.val_size: 2074 is more than the {what}", hint)]
    assert check(difficulty=2, seed=0, train_size=192, val_size=2073) == []


@pytest.mark.parametrize("difficulty", [0, 1, 7])
def test_check_refuses_a_difficulty_without_problems(difficulty: int) -> None:
    assert texts(check(difficulty=difficulty, seed=0, train_size=0, val_size=0)) == [
        (f"task.difficulty: {difficulty} is not in 2..6", "give the number of digits of an operand")
    ]


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("132", 1.0),
        (" 132\n", 1.0),
        ("0132", 0.0),
        ("+132", 0.0),
        ("132.0", 0.0),
        ("132 133", 0.0),
        ("47+85=132", 0.0),
        ("13", 0.0),
        ("1320", 0.0),
        ("１３２", 0.0),
        ("", 0.0),
    ],
)
def test_score_wants_the_exact_sum(response: str, reward: float) -> None:
    assert score(response=response, truth="132") == reward

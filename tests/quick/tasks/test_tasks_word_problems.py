"""The built-in word problems: their numbers, their two sides that never meet, and what is right."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from appliance.errors import RecipeError
from appliance.tasks.built_in.word_problems import (
    FORMS,
    SYSTEM,
    UNNAMED_THINGS,
    check,
    pools,
    score,
    splits,
)
from appliance.tasks.rows import Problem
from appliance.tasks.task import Splits

SUM, STORY_OF_A_SUM, DIFFERENCE, STORY_OF_A_DIFFERENCE = range(4)


def make(*, seed: int = 0, train_size: int = 0, val_size: int = 0) -> Splits:
    return splits(difficulty=2, seed=seed, train_size=train_size, val_size=val_size)


def form_of(problem: Problem) -> int:
    marks = (" plus ", " gets ", " minus ", " gives away ")
    (form,) = [number for number, mark in enumerate(marks) if mark in problem.prompt]
    return form


def names_an_unnamed_thing(problem: Problem) -> bool:
    return any(f" {thing}" in problem.prompt for thing in UNNAMED_THINGS)


def test_each_form_in_its_words() -> None:
    first = [forms[0] for forms in pools()[0]]
    assert [(problem.prompt, problem.truth) for problem in first] == [
        ("What is 2 apples plus 2 apples?", "4"),
        ("Zoe has 2 apples and gets 2 more. How many apples does Zoe have?", "4"),
        ("What is 3 apples minus 2 apples?", "1"),
        ("Mia has 3 apples and gives away 2. How many apples does Mia have left?", "1"),
    ]
    assert {problem.before for problem in first} == {(("system", SYSTEM),)}


def test_every_truth_is_the_sum_or_the_difference() -> None:
    for side in pools():
        for form, problems in enumerate(side):
            for problem in problems:
                a, b = map(int, re.findall(r"\d+", problem.prompt))
                right = a + b if form in (SUM, STORY_OF_A_SUM) else a - b
                assert (problem.truth, form_of(problem)) == (str(right), form)
                assert 1 <= right <= 20


def test_no_seed_trains_on_what_another_validates() -> None:
    validated = {problem.prompt for seed in range(3) for problem in make(seed=seed).val}
    trained = {problem.prompt for seed in range(3) for problem in make(seed=seed).train}
    assert len(trained) + len(validated) == sum(len(operands) for _, operands, _ in FORMS) * 12
    assert not trained & validated


def test_the_forms_take_turns() -> None:
    made = make(train_size=400, val_size=200)
    for problems in (made.train, made.val):
        assert [form_of(problem) for problem in problems[:8]] == [*range(4), *range(4)]
        assert set(Counter(map(form_of, problems)).values()) == {len(problems) // 4}


def test_a_seed_draws_and_orders_the_problems() -> None:
    first, again, other = make(train_size=40), make(train_size=40), make(seed=1, train_size=40)
    assert first == again
    assert first.train != other.train
    assert first.val != other.val and set(first.val) == set(other.val)


def test_a_large_validation_goes_on_with_things_that_no_training_names() -> None:
    usual, large = make(val_size=617).val, make(val_size=2000).val
    assert large[:617] == usual == make().val
    assert len({problem.prompt for problem in large}) == 2000
    assert not any(map(names_an_unnamed_thing, (*make().train, *usual)))
    assert all(map(names_an_unnamed_thing, large[617:]))
    assert set(Counter(map(form_of, large[617:])).values()) <= {345, 346}
    assert make(val_size=2000).val == large != make(seed=1, val_size=2000).val


def test_splits_refuse_what_the_task_cannot_serve_all_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        splits(difficulty=3, seed=0, train_size=9999, val_size=6666)
    train, validation = (sum(map(len, side)) for side in pools())
    assert (train, validation) == (2407, 617)
    assert caught.value.problems == [
        ("task.difficulty: 3 is for `arithmetic`; these problems have one difficulty", "remove it"),
        ("task.train_size: 9999 is more than the 2407 problems", "lower it"),
        ("task.val_size: 6666 is more than the 6665 problems", "lower it"),
    ]
    assert check(difficulty=2, seed=0, train_size=2407, val_size=6665) == []


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("12", 1.0),
        ("Tom has 7 + 5 = 12 apples.", 1.0),
        ("The answer is 12.", 1.0),
        ("Tom has 12 apples, 5 more", 0.0),
        ("Tom has 7 apples and gets", 0.0),
        ("twelve", 1.0),
        ("13", 0.0),
        ("", 0.0),
    ],
)
def test_score_reads_the_number_of_the_answer(response: str, reward: float) -> None:
    assert score(response=response, truth="12") == reward

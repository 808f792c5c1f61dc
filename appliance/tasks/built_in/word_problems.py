"""One-step word problems with small numbers. `Tom has 7 apples and gets 5 more. How many apples does Tom have?`: `12`.

The numbers of a problem run from 2 to 11, so its answer is at most 20. There are four forms, two sums and two
differences: as a story about somebody, and as a bare calculation with things. Validation meets each form equally often,
until it has no problem left; in training, which is shuffled, about two of three problems are sums.

Training and validation share no problem. The text of a problem decides on which side it is, not a seed: no seed trains
on what another one validates. Numbers are not held out: `7 and 5` may be met in both, with other words around them.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections.abc import Callable

from appliance.errors import RecipeError
from appliance.tasks.graders import number
from appliance.tasks.maths.equality import prepare
from appliance.tasks.rows import Faults, Problem
from appliance.tasks.task import Response, Splits, Task

SYSTEM = "Answer with the number alone."
NAMES = ("Tom", "Anna", "Ben", "Lisa", "Sam", "Mia", "Max", "Emma", "Leo", "Zoe", "Jack", "Lily")
THINGS = ("apples", "books", "coins", "eggs", "pens", "cards", "stones", "shells", "cakes", "balls", "stamps", "cups")
LEAST, MOST = 2, 10  # of what is added, and of the first number of a sum
VALIDATION_SHARE = 0.2
USUAL_DIFFICULTY = 2  # the schema's default: this task has only one

Pools = tuple[tuple[Problem, ...], ...]  # one for each form


def _sum(a: int, b: int, *, thing: str, **_: str) -> str:
    return f"What is {a} {thing} plus {b} {thing}?"


def _gets(a: int, b: int, *, thing: str, name: str) -> str:
    return f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have?"


def _difference(a: int, b: int, *, thing: str, **_: str) -> str:
    return f"What is {a} {thing} minus {b} {thing}?"


def _gives(a: int, b: int, *, thing: str, name: str) -> str:
    return f"{name} has {a} {thing} and gives away {b}. How many {thing} does {name} have left?"


SUMS = [(a, b) for a in range(LEAST, MOST + 1) for b in range(LEAST, MOST + 1)]
DIFFERENCES = [(a, b) for a in range(LEAST + 1, MOST + 2) for b in range(LEAST, a)]
FORMS: tuple[tuple[Callable[..., str], list[tuple[int, int]], int], ...] = (
    (_sum, SUMS, 1),
    (_gets, SUMS, 1),
    (_difference, DIFFERENCES, -1),
    (_gives, DIFFERENCES, -1),
)
"""Each with the numbers that it takes, and the sign of the second one."""


@functools.cache  # every recipe that is read asks for the number of problems
def pools() -> tuple[Pools, Pools]:
    """(training, validation): the problems of each form, in a fixed order."""
    train, validation = [], []
    for text, operands, sign in FORMS:
        sides: tuple[list[Problem], list[Problem]] = ([], [])
        for (a, b), thing in itertools.product(operands, THINGS):
            name = NAMES[int(_share(f"{text.__name__} {a} {b} {thing}") * len(NAMES))]
            prompt = text(a, b, thing=thing, name=name)
            problem = Problem(prompt=prompt, truth=str(a + sign * b), before=(("system", SYSTEM),))
            sides[_share(prompt) < VALIDATION_SHARE].append(problem)
        train.append(tuple(sides[False]))
        validation.append(tuple(sides[True]))
    return tuple(train), tuple(validation)


def _share(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def splits(*, difficulty: int, seed: int, train_size: int, val_size: int) -> Splits:
    """Training and validation problems of a seed. A size of 0 takes all. Raises RecipeError for what `check` finds."""
    faults = check(difficulty=difficulty, seed=seed, train_size=train_size, val_size=val_size)
    if faults:
        raise RecipeError(faults)
    train, validation = pools()
    return Splits(
        train=_draw(train, seed=f"{seed}-train", size=train_size),
        val=_draw(validation, seed=f"{seed}-validation", size=val_size),
    )


def _draw(forms: Pools, *, seed: str, size: int) -> list[Problem]:
    """The forms take turns; within a form the seed orders the problems."""
    draw = random.Random(seed)
    shuffled = [draw.sample(problems, k=len(problems)) for problems in forms]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*shuffled))
    return [problem for problem in turns if problem is not None][: size or None]


def check(*, difficulty: int, seed: int, train_size: int, val_size: int) -> Faults:
    """The faults of every value that the task cannot serve."""
    faults = []
    if difficulty != USUAL_DIFFICULTY:
        message = f"task.difficulty: {difficulty} is of `arithmetic`, these problems have one difficulty"
        faults.append((message, "remove it"))
    sides = zip(("train", "val"), (train_size, val_size), pools(), strict=True)
    for side, size, forms in sides:
        available = sum(map(len, forms))
        if size > available:
            faults.append((f"task.{side}_size: {size} is more than the {available} problems", "lower it"))
    return faults


def score(*, response: str, truth: str) -> float:
    """1.0 when the number that the response states as its answer, else its last number, is the truth; else 0.0."""
    return number(Response(response, truth))


TASK = Task(
    kind="word-problems",
    score=score,
    answers=lambda truth: (truth, f"The answer is {truth}."),
    describe="a sum or a difference up to 20, as a story or with things; 1 for its number, else 0",
    make=splits,
    check_sizes=check,
    import_reward=prepare,
)

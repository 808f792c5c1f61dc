"""One-step word problems with small numbers. `Tom has 7 apples and gets 5 more. How many apples does Tom have?`: `12`.

The numbers of a problem run from 2 to 11, so its answer is at most 20. There are four forms, two sums and two
differences: as a story about somebody, and as a bare calculation with things. Validation meets each form equally often,
until it has no problem left; in training, which is shuffled, about two of three problems are sums.

Training and validation share no problem. The text of a problem decides on which side it is, not a seed: no seed trains
on what another one validates. Numbers are not held out: `7 and 5` may be met in both, with other words around them.
A validation of more problems than are held out continues with things that no training names, such as hats.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator

from appliance.errors import RecipeError
from appliance.finding import Finding, fault
from appliance.tasks.graders import number
from appliance.tasks.maths.equality import prepare
from appliance.tasks.rows import Problem
from appliance.tasks.task import Response, Splits, TaskDefinition

SYSTEM = "Answer with the number alone."
NAMES = ("Tom", "Anna", "Ben", "Lisa", "Sam", "Mia", "Max", "Emma", "Leo", "Zoe", "Jack", "Lily")
THINGS = ("apples", "books", "coins", "eggs", "pens", "cards", "stones", "shells", "cakes", "balls", "stamps", "cups")
UNNAMED_THINGS = (
    *("bags", "beads", "bells", "boxes", "bricks", "buttons", "candles", "carrots", "chairs", "clocks", "dolls"),
    *("flags", "forks", "hats", "jars", "keys", "kites", "lamps", "lemons", "masks", "mugs", "nuts", "pears", "rings"),
)
"""Things that no training names, for large validations."""
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
Form = tuple[Callable[..., str], list[tuple[int, int]], int]
FORMS: tuple[Form, ...] = (
    (_sum, SUMS, 1),
    (_gets, SUMS, 1),
    (_difference, DIFFERENCES, -1),
    (_gives, DIFFERENCES, -1),
)
"""Forms of problems, each with the numbers that it takes and the sign of the second number."""


@functools.cache  # every recipe that is read asks for the number of problems
def pools() -> tuple[Pools, Pools]:
    """Return (training, validation): the problems of each form, in a fixed order."""
    train, validation = [], []
    for form in FORMS:
        sides: tuple[list[Problem], list[Problem]] = ([], [])
        for problem in _problems(form, things=THINGS):
            sides[_share(problem.prompt) < VALIDATION_SHARE].append(problem)
        train.append(tuple(sides[False]))
        validation.append(tuple(sides[True]))
    return tuple(train), tuple(validation)


@functools.cache
def unnamed_pools() -> Pools:
    """Return the problems of each form with things that no training names, in a fixed order."""
    return tuple(tuple(_problems(form, things=UNNAMED_THINGS)) for form in FORMS)


def _problems(form: Form, *, things: Iterable[str]) -> Iterator[Problem]:
    text, operands, sign = form
    for (a, b), thing in itertools.product(operands, things):
        name = NAMES[int(_share(f"{text.__name__} {a} {b} {thing}") * len(NAMES))]
        prompt = text(a, b, thing=thing, name=name)
        yield Problem(prompt=prompt, truth=str(a + sign * b), before=(("system", SYSTEM),))


def _share(text: str) -> float:
    """Return a number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def splits(*, difficulty: int, seed: int, train_size: int, val_size: int) -> Splits:
    """Draw the training and validation problems of a seed. Raises RecipeError for what `check` finds.

    A size of 0 takes all problems of its side. A larger validation continues with things that no training names.
    """
    faults = check(difficulty=difficulty, seed=seed, train_size=train_size, val_size=val_size)
    if faults:
        raise RecipeError(faults)
    train, validation = pools()
    val = _draw(validation, seed=f"{seed}-validation", size=val_size)
    if len(val) < val_size:
        val += _draw(unnamed_pools(), seed=f"{seed}-unnamed", size=val_size - len(val))
    return Splits(train=_draw(train, seed=f"{seed}-train", size=train_size), val=val)


def _draw(forms: Pools, *, seed: str, size: int) -> list[Problem]:
    """Order the problems: the forms take turns, and within a form the seed orders them."""
    draw = random.Random(seed)
    shuffled = [draw.sample(problems, k=len(problems)) for problems in forms]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*shuffled))
    return [problem for problem in turns if problem is not None][: size or None]


def check(*, difficulty: int, seed: int, train_size: int, val_size: int) -> list[Finding]:
    """Report every value that the task cannot serve."""
    faults = []
    if difficulty != USUAL_DIFFICULTY:
        message = f"{difficulty} is for `arithmetic`; these problems have one difficulty"
        faults.append(fault(("task.difficulty",), message, "remove it"))
    train, validation = pools()
    for side, size, forms in (("train", train_size, train), ("val", val_size, (*validation, *unnamed_pools()))):
        available = sum(map(len, forms))
        if size > available:
            faults.append(fault((f"task.{side}_size",), f"{size} is more than the {available} problems", "lower it"))
    return faults


def score(*, response: str, truth: str) -> float:
    """Return 1.0 when the number that the response states as its answer, else its last number, is the truth; else
    0.0."""
    return number(Response(response, truth))


TASK = TaskDefinition(
    kind="word-problems",
    score=score,
    answers=lambda truth: (truth, f"The answer is {truth}."),
    describe="a sum or a difference up to 20, as a story or with things; 1 for its number, else 0",
    make=splits,
    check_sizes=check,
    import_reward=prepare,
)

"""The built-in task: add two numbers of `difficulty` digits. Prompt `47+85`, truth `132`.

Three pools share no problem, and `a+b` and `b+a` count as one problem. The pool is a property of the problem, not of
a seed: one warm-started model therefore serves every seed, and no seed can move a problem that the model has seen
into training or validation. The seed draws from the pool and orders what it drew.

    pool        share   two-digit problems
    warm start  0.70    5671
    training    0.18    1431
    validation  0.12    998

A validation that is larger than its pool continues with training problems that `train_size` leaves: those that are
neither trained on nor the mirror of one that is.
"""

from __future__ import annotations

import functools
import hashlib
import random
from enum import StrEnum

from appliance.errors import RecipeError
from appliance.finding import Finding, fault
from appliance.tasks.rows import Problem
from appliance.tasks.task import Splits, TaskDefinition

MIN_DIFFICULTY = 2  # one digit gives 81 problems: too few for a validation of 500
MAX_DIFFICULTY = 6
_POOL_LIMIT = 20_000  # pairs looked at; all of them up to two digits, a seeded sample above


class Pool(StrEnum):
    WARM_START = "warm-start"
    TRAIN = "train"
    VALIDATION = "validation"


def pool_of(a: int, b: int) -> Pool:
    """Return the pool of the problem `a+b`, the same for `b+a`."""
    digest = hashlib.sha256(f"{min(a, b)}+{max(a, b)}".encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    if share < 0.70:
        return Pool.WARM_START
    return Pool.TRAIN if share < 0.88 else Pool.VALIDATION


@functools.cache  # every recipe that is read asks for their number
def pairs(pool: Pool, *, difficulty: int) -> tuple[tuple[int, int], ...]:
    """List all pairs of a pool in numeric order; above two digits those of a fixed sample of 20 000 pairs."""
    low, high = 10 ** (difficulty - 1), 10**difficulty
    if (high - low) ** 2 <= _POOL_LIMIT:
        candidates = [(a, b) for a in range(low, high) for b in range(low, high)]
    else:
        draw = random.Random(difficulty)
        sample = {(draw.randrange(low, high), draw.randrange(low, high)) for _ in range(_POOL_LIMIT)}
        candidates = sorted(sample)
    return tuple(pair for pair in candidates if pool_of(*pair) is pool)


def problem(a: int, b: int) -> Problem:
    return Problem(prompt=f"{a}+{b}", truth=str(a + b))


def splits(*, difficulty: int, seed: int, train_size: int, val_size: int) -> Splits:
    """Draw the training and validation problems of a seed. A size of 0 takes the whole pool. Raises RecipeError for a
    difficulty outside 2..6 and for a size above its pool, all at once."""
    faults = check(difficulty=difficulty, seed=seed, train_size=train_size, val_size=val_size)
    if faults:
        raise RecipeError(faults)
    train, left = _train(difficulty=difficulty, seed=seed, size=train_size)
    validation = _shuffled(Pool.VALIDATION, difficulty=difficulty, seed=seed)
    val = (validation + left)[:val_size] if val_size else validation
    return Splits(train=[problem(*pair) for pair in train], val=[problem(*pair) for pair in val])


def check(*, difficulty: int, seed: int, train_size: int, val_size: int) -> list[Finding]:
    """Report every value that the task cannot serve."""
    if not MIN_DIFFICULTY <= difficulty <= MAX_DIFFICULTY:
        message = f"{difficulty} is not in {MIN_DIFFICULTY}..{MAX_DIFFICULTY}"
        return [fault(("task.difficulty",), message, "give the number of digits of an operand")]
    faults = []
    train = len(pairs(Pool.TRAIN, difficulty=difficulty))
    if train_size > train:
        message = f"{train_size} is more than the {train} train problems of difficulty {difficulty}"
        faults.append(fault(("task.train_size",), message, "lower it, or raise task.difficulty"))
        train_size = 0
    val = len(pairs(Pool.VALIDATION, difficulty=difficulty))
    if val_size > val:
        left = len(_train(difficulty=difficulty, seed=seed, size=train_size)[1])
        if val_size > val + left:
            of = f"{val + left} validation problems of difficulty {difficulty}"
            also = f", the {left} that task.train_size leaves included" if left else ""
            message = f"{val_size} is more than the {of}{also}"
            hint = "lower it, or lower task.train_size to leave more for validation; or raise task.difficulty"
            faults.append(fault(("task.val_size",), message, hint))
    return faults


def _train(*, difficulty: int, seed: int, size: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Draw the problems to train on, and those of their pool that are neither among them nor the mirror of one."""
    drawn = _shuffled(Pool.TRAIN, difficulty=difficulty, seed=seed)
    train = drawn[: size or None]
    known = {*train, *((b, a) for a, b in train)}
    return train, [pair for pair in drawn if pair not in known]


def _shuffled(pool: Pool, *, difficulty: int, seed: int) -> list[tuple[int, int]]:
    drawn = list(pairs(pool, difficulty=difficulty))
    random.Random(f"{seed}-{pool}").shuffle(drawn)
    return drawn


def score(*, response: str, truth: str) -> float:
    """Return 1.0 when the response is exactly the sum in decimal digits (white space around it is ignored), else
    0.0."""
    return float(response.strip() == truth)


TASK = TaskDefinition(
    kind="arithmetic",
    score=score,
    answers=lambda truth: (truth,),
    describe="a sum of two numbers; 1 for exactly its digits, else 0",
    make=splits,
    check_sizes=check,
)

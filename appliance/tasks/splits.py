"""Training and validation problems out of files or the hub: disjoint, each problem once, counted."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from appliance.errors import RecipeError
from appliance.hub import download_data
from appliance.record.liveness import Heartbeat
from appliance.tasks.problem import Problem, Splits
from appliance.tasks.rows import Found, Parse, read_file, read_files


@dataclass(frozen=True)
class Source:
    """Where a task's problems come from. parse, hint: of a row, as `rows.read_file` takes them.

    from_hub: by the split's name, `train` or `val`; raises RecipeError when the hub is away.
    """

    parse: Parse
    hint: str
    from_hub: Callable[[str], Found]


def make_splits(source: Source, *, train_file: str, val_file: str, seed: int, train_size: int, val_size: int) -> Splits:
    """From files or, without a train_file, from the hub. A size of 0 takes all; training is in the seed's order.

    Without a val_file the seed holds out val_size problems of the train_file.
    Raises RecipeError for bad rows of both files at once, for sizes that leave nothing, and when the hub is away.
    """
    if not train_file:
        found = {"train": source.from_hub("train"), "val": source.from_hub("val")}
    else:
        files = {"train": train_file} | ({"val": val_file} if val_file else {})
        read = read_files(*files.values(), parse=source.parse, hint=source.hint)
        found = dict(zip(files, read, strict=True))
    notes = [note for name, each in found.items() for note in _counts(name, each)]
    train = found["train"].problems
    if "val" in found:
        val = found["val"].problems
        seen = {problem.prompt for problem in val}
        shared = sum(problem.prompt in seen for problem in train)
        if shared:
            notes.append(f"train: {shared} problems are in the validation data as well and are left out")
            train = [problem for problem in train if problem.prompt not in seen]
    else:
        train, val = _hold_out(train, path=train_file, seed=seed, val_size=val_size)
    train = list(train)
    random.Random(f"{seed}-train").shuffle(train)
    return Splits(train=train[: train_size or None], val=val[: val_size or None], notes=tuple(notes))


def _counts(name: str, found: Found) -> list[str]:
    """Nothing where every row is a problem of its own."""
    notes = []
    if found.repeated:
        notes.append(f"{name}: {found.rows} rows, {len(found.problems)} distinct problems: each counts once")
    if found.conflicting:
        notes.append(f"{name}: {found.conflicting} rows repeat a problem with another answer: the first one counts")
    return notes


def _hold_out(problems: list[Problem], *, path: str, seed: int, val_size: int) -> tuple[list[Problem], list[Problem]]:
    """(train, val): val_size problems drawn by the seed."""
    distinct = sorted(problems, key=lambda each: each.prompt)
    if not 0 < val_size < len(distinct):
        message = f"task.val_size: {val_size} of the {len(distinct)} problems in {path} leaves none for one side"
        raise RecipeError([(message, f"use 1 to {max(1, len(distinct) - 1)}, or give task.val_file")])
    random.Random(f"{seed}-hold-out").shuffle(distinct)
    return distinct[val_size:], distinct[:val_size]


def hub_file(name: str, *, file: str, source: Source) -> Found:
    """The problems of one file of a data set on the hub; a download that broke off goes on where it was.

    Raises RecipeError.
    """
    try:
        path = download_data(name, file=file, beat=Heartbeat().beat)
    except OSError as error:  # no network, no such file, or offline mode
        raise hub_is_away(name, error=error) from error
    found = read_file(path, parse=source.parse, hint=source.hint)
    if found.faults:
        raise RecipeError(found.faults)
    return found


def hub_is_away(name: str, *, error: Exception) -> RecipeError:
    why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    hint = "give a file: task.train_file in a recipe, --from with `appliance data`"
    return RecipeError([(f"no data file is given, and {name} cannot be had from the hub: {why}", hint)])

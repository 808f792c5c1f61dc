"""What a task is: problems to learn from, and a score for a response. One file per task, and its line in library.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from appliance.tasks.problem import Problem, Splits
from appliance.tasks.rows import read_file
from appliance.tasks.splits import Source, make_splits

Faults = list[tuple[str, str]]  # (message, hint)


class Score(Protocol):
    def __call__(self, *, response: str, truth: str) -> float:
        """The reward in [0, 1]."""


@dataclass(frozen=True)
class DataFile:
    """What `appliance data` makes of a data set on the hub. split: `train` or `val`."""

    name: str
    split: str
    hub: str


def _nothing_to_import() -> None:
    """The reward needs nothing that takes long to load."""


@dataclass(frozen=True)
class Task:
    kind: str
    """As `task.kind` names it."""
    score: Score
    answers: Callable[[str], Iterable[str]]
    """Responses with this truth: in the form that the task asks for, then in others that its reward reads."""
    source: Source | None = None
    """Of rows in a file or on the hub; None: the task makes its problems itself."""
    make: Callable[..., Splits] | None = None
    """Of a task that makes its problems: (*, difficulty, seed, train_size, val_size)."""
    check_sizes: Callable[..., Faults] | None = None
    """The same of such a task, before anything is made: what it cannot serve."""
    checked_rows: int | None = None
    """Of a file, before a run; None: all."""
    import_reward: Callable[[], None] = _nothing_to_import
    """Import now what `score` will need."""
    data_sets: Mapping[str, tuple[DataFile, ...]] = field(default_factory=dict)
    """By the name that `appliance data` takes."""

    def splits(
        self, *, difficulty: int, train_file: str, val_file: str, seed: int, train_size: int, val_size: int
    ) -> Splits:
        """Training and validation problems. Raises RecipeError; see `make` and `splits.make_splits`."""
        sizes = {"seed": seed, "train_size": train_size, "val_size": val_size}
        if self.make is not None:
            return self.make(difficulty=difficulty, **sizes)
        assert self.source is not None, "a task makes its problems or reads them"
        return make_splits(self.source, train_file=train_file, val_file=val_file, **sizes)

    def check_rows(self, path: str | Path) -> Faults:
        """For the rows of a data file, each `file:line: message`; after 20 of them their number."""
        if self.source is None:
            return []
        return read_file(path, parse=self.source.parse, hint=self.source.hint, most_rows=self.checked_rows).faults

    def first_problems(self, count: int, *, file: str, difficulty: int, seed: int) -> list[Problem]:
        """Of the file, or of those that the task makes."""
        if self.make is not None:
            return self.make(difficulty=difficulty, seed=seed, train_size=count, val_size=1).train
        assert self.source is not None, "a task makes its problems or reads them"
        return read_file(file, parse=self.source.parse, hint=self.source.hint, most_rows=count).problems

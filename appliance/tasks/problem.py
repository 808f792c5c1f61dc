"""What every task makes: problems, as rows of the parquet that verl reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """prompt: what the user says, one chat message.  truth: the reference that the reward compares with."""

    prompt: str
    truth: str


@dataclass(frozen=True)
class Splits:
    """train and val share no problem.  dropped: problems left out because their prompt is too long.

    notes: what was counted on the way, for people.
    """

    train: list[Problem]
    val: list[Problem]
    dropped: int = 0
    notes: tuple[str, ...] = ()

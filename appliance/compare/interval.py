"""An interval of a difference of rewards: a bootstrap makes it (bootstrap.py), and a verdict reads it (judge.py)."""

from __future__ import annotations

from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean difference of rewards."""

    mean: float
    low: float
    """The lower one of the bounds that hold the true mean with CONFIDENCE."""
    high: float
    """The upper one."""

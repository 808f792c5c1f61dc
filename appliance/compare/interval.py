"""An interval of a difference of rewards: a bootstrap makes it (bootstrap.py), and a verdict reads it (judge.py)."""

from __future__ import annotations

from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean difference of rewards."""

    mean: float
    low: float
    """Lower bound: with CONFIDENCE the true mean lies between the two."""
    high: float
    """Upper bound."""

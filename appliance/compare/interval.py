"""A mean difference of rewards and how sure it is. Without numpy; `compare.bootstrap` makes them."""

from __future__ import annotations

from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """low, high: the bounds that hold the true mean with CONFIDENCE."""

    mean: float
    low: float
    high: float

    def within(self, margin: float) -> bool:
        return -margin <= self.low and self.high <= margin

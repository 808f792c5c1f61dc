"""Curves of many points, made short enough for a page: what is left out shows as a band. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST = 360  # points of one curve: about one a pixel of a chart

Point = tuple[float, float, float, float]


def thinned(points: Sequence[tuple[float, float | None]], *, most: int = MOST) -> list[Point]:
    """(x, mean, smallest, largest) of (x, value) pairs, x ascending; runs of points are put together above `most`.

    A value that is None becomes NaN, where a curve breaks; within a run it is left out.
    """
    size = max(1, math.ceil(len(points) / most))
    return [_together(points[start : start + size]) for start in range(0, len(points), size)]


def _together(run: Sequence[tuple[float, float | None]]) -> Point:
    values = [value for _, value in run if value is not None]
    x = run[len(run) // 2][0]
    if not values:
        return x, math.nan, math.nan, math.nan
    return x, sum(values) / len(values), min(values), max(values)

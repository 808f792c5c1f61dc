"""Strings that draw: durations, sparklines, bars. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

_SPARKS = "▁▂▃▄▅▆▇█"
FILLS = "█▓▒░·"  # of the parts of a whole
IN_ASCII = str.maketrans("▁▂▃▄▅▆▇█▓▒░·", "_.-=+*%#=+-.")  # for terminals that have no block characters


def duration(seconds: float) -> str:
    """Format a duration: `42 s`, `2 min 5 s`, `3 h 12 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def number(value: float | None, *, digits: int = 3) -> str:
    """Format a number with a fixed number of digits after the point; `-` for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def tokens_per_s(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} tokens/s"


def sparkline(values: Sequence[float], *, width: int) -> str:
    """Draw values from left to right in at most `width` characters; more values than that are averaged in groups."""
    if not values:
        return ""
    size = math.ceil(len(values) / width)
    groups = [values[start : start + size] for start in range(0, len(values), size)]
    shown = [sum(group) / len(group) for group in groups]
    low, high = min(shown), max(shown)
    return "".join(_SPARKS[round((value - low) / ((high - low) or 1.0) * (len(_SPARKS) - 1))] for value in shown)


def bar(done: float, *, total: float, width: int) -> str:
    """Draw a bar of `width` characters between brackets; full only when all is done."""
    share = min(1.0, max(0.0, done / total)) if total > 0 else 0.0
    filled = math.floor(share * width)
    return f"[{'█' * filled}{'░' * (width - filled)}]"


def split_bar(parts: Sequence[float], *, width: int) -> str:
    """Draw the parts of a whole, each in its pattern of FILLS, `width` characters together."""
    whole = sum(parts)
    if whole <= 0:
        return ""
    edges = [round(sum(parts[: index + 1]) / whole * width) for index in range(len(parts))]
    lengths = [b - a for a, b in zip([0, *edges], edges, strict=False)]
    return "".join(FILLS[index] * length for index, length in enumerate(lengths))

"""Numbers of things, in words for people."""

from __future__ import annotations


def counted(number: float, noun: str, *, plural: str = "") -> str:
    """Return the number with its noun: `1 step`, `12 steps`. plural: where it is not the noun with an s. Both may be
    the beginning of a sentence: `1 layer differs`, `2 layers differ`."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"

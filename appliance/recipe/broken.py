"""A rule over several keys that a recipe breaks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Broken:
    """keys: the dotted keys concerned; the message stands at the first that the user wrote."""

    keys: tuple[str, ...]
    message: str
    hint: str = ""

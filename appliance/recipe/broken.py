"""A rule over several keys of a recipe that it breaks."""

from __future__ import annotations

from typing import NamedTuple


class Broken(NamedTuple):
    """A rule over several keys that a recipe breaks."""

    keys: tuple[str, ...]
    """The dotted keys concerned; the message stands at the first that the user wrote."""
    message: str
    hint: str = ""

"""A truth as text: what a value of a row is to the rewards."""

from __future__ import annotations

import json
import math
from decimal import Decimal

_FORMS: dict[type, str] = {bool: "true or false", str: "text", int: "a number", float: "a number"}
_FORMS |= {list: "a list", dict: "an object"}


def as_text(value: object) -> str:
    """Return text as it is, everything else as JSON; a number without an exponent, 132.0 as 132."""
    if isinstance(value, float):
        return _in_digits(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def answer_text(value: object) -> str:
    """Return an answer to compare with: text, a number, or the JSON list of the texts each of which is right.

    Raises ValueError for what is none of them, in words that follow the name of its field.
    """
    if isinstance(value, list):
        if not value:
            raise ValueError("is an empty list")
        for number, member in enumerate(value, start=1):
            if form_of(member) not in ("text", "a number") or is_nothing(member):
                what = as_text(member) if is_nothing(member) else form_of(member)
                raise ValueError(f"is a list, and its member {number} is {what}, neither text nor a number")
            if not as_text(member).strip():
                raise ValueError(f"is a list, and its member {number} is empty")
        return json.dumps([as_text(member) for member in value], ensure_ascii=False)
    if form_of(value) not in ("text", "a number"):
        raise ValueError(f"is {form_of(value)}, neither text, a number nor a list of them")
    return as_text(value)


def form_of(value: object) -> str:
    """Name the kind of thing that a value is."""
    return next((form for kind, form in _FORMS.items() if isinstance(value, kind)), "null")


def is_nothing(value: object) -> bool:
    """Tell whether a value is null, or what a column of numbers has in its place."""
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def _in_digits(value: float) -> str:
    """Return its shortest decimal form without an exponent, a whole number without a point: `0.00001`, `132`; `NaN`,
    `Infinity` and `-Infinity` as JSON has them."""
    return f"{Decimal(repr(value or 0.0)):f}".removesuffix(".0")  # -0.0 is 0

"""pydantic's errors in our words: the fact and the remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from typing import Any

from pydantic_core import ErrorDetails

from appliance.recipe.schema import SECTIONS, Lora, Recipe, Reward, ValSet
from appliance.recipe.text import scalar
from appliance.terms.schemes import listed

_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
    "dict_type": "a mapping of keys",
    "tuple_type": "a list",
}
_BOUNDS = {
    "greater_than": ("must be greater than", "gt"),
    "greater_than_equal": ("must be at least", "ge"),
    "less_than": ("must be less than", "lt"),
    "less_than_equal": ("must be at most", "le"),
}

_NESTED = {"rewards": Reward, "val_sets": ValSet, "lora": Lora}  # keys whose values have keys of their own


def explain(error: ErrorDetails) -> tuple[str, str]:
    """(message, hint) of one error."""
    kind, value, path, context = error["type"], error["input"], error["loc"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return "unknown key", _similar_key([str(part) for part in path])
    if kind == "missing":
        return "it is missing", _rewards_hint(None) if path[:2] == ("task", "rewards") else ""
    if kind in _KINDS:
        is_reward = path[:2] == ("task", "rewards") and len(path) < 4
        hint = _rewards_hint(value) if is_reward else _quoting_hint(kind, value)
        if kind in ("string_type", "dict_type") and value is None:
            hint = _leaving_out(path)
        return f"expected {_KINDS[kind]}, got {shown(value)}", hint
    if kind in _BOUNDS:
        text, name = _BOUNDS[kind]
        bound = context[name]
        return f"{text} {int(bound) if bound == int(bound) else bound}, got {shown(value)}", ""
    if kind == "enum":
        return _unknown_value(value, legal=re.findall(r"'([^']+)'", context["expected"]))
    if kind == "string_too_short":
        return "expected text, got nothing", _leaving_out(path)
    if kind == "too_short":
        return "expected at least one value, got none", _leaving_out(path)
    if kind == "string_pattern_mismatch" and path[-1] == "address":
        return f"{shown(value)} is not an address", "give host and port, such as `10.0.0.7:6379`"
    if kind == "string_pattern_mismatch" and path[-1] == "revision":
        return f"{shown(value)} is not a revision", "give a commit, a tag or a branch of the model on the hub"
    if kind == "string_pattern_mismatch":
        return f"{shown(value)} is not a name", "use letters, digits, `.`, `_` and `-`, at most 80, no space or slash"
    return f"{error['msg']}, got {shown(value)}", ""


def shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return f"the text `{value[:60]}`"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return f"`{_in_yaml(value)}`"


def _in_yaml(value: bool | int | float) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _similar_key(path: list[str]) -> str:
    """Where an unknown key may belong."""
    if len(path) > 2 and path[1] in _NESTED:
        return similar(path[-1], of=_NESTED[path[1]].model_fields)
    section = SECTIONS.get(path[0]) if len(path) > 1 else None
    fields = section.model_fields if section else Recipe.model_fields
    if near := difflib.get_close_matches(path[-1], fields, n=1):
        return f"did you mean `{'.'.join((*path[:-1], near[0]))}`?"
    home = next((name for name, kind in SECTIONS.items() if path[-1] in kind.model_fields), "")
    return f"did you mean `{home}.{path[-1]}`?" if home else f"use one of {listed(fields)}"


def _leaving_out(path: tuple[int | str, ...]) -> str:
    """How a key has no value: not all of them take null. Empty for what is no key of a recipe."""
    section = SECTIONS.get(str(path[0]))
    field = section.model_fields.get(str(path[1])) if section and len(path) > 1 else None
    if field and isinstance(path[-1], str) and (nested := _NESTED.get(str(path[1]))) and len(path) > 2:
        field = nested.model_fields.get(path[-1])
    if field is None or field.is_required():
        return ""
    if isinstance(path[-1], int):
        return "remove it from the list"
    return "null leaves it out" if field.default is None else f"its default is `{field.default}`"


def _rewards_hint(value: Any) -> str:
    is_name = isinstance(value, str) and re.fullmatch(r"[\w./:-]{1,60}", value)
    return f"write `[{{name: {value if is_name else 'math'}}}]`"


def _quoting_hint(kind: str, value: Any) -> str:
    if kind in ("int_type", "float_type") and isinstance(value, str) and _reads_as_number(value):
        return "remove the quotes"
    if kind == "bool_type" and isinstance(value, str) and value.lower() in ("yes", "on", "no", "off"):
        return f"write {'true' if value.lower() in ('yes', 'on') else 'false'}"
    if kind == "string_type" and isinstance(value, int | float):
        return f'put it in quotes: "{_in_yaml(value)}"'
    if kind == "tuple_type" and isinstance(value, str):
        return f"write `[{value[:60]}]`"
    if kind == "tuple_type" and isinstance(value, int | float):
        return "give numbers in brackets, with commas between them"
    return ""


def _reads_as_number(text: str) -> bool:
    try:
        return isinstance(scalar(text), int | float)
    except ValueError:
        return False


def _unknown_value(value: Any, *, legal: list[str]) -> tuple[str, str]:
    use = f"use one of {listed(legal)}"
    if not isinstance(value, str):
        return f"expected text, got {shown(value)}", use
    near = difflib.get_close_matches(value, legal, n=1)
    return f"unknown value `{value[:60]}`", f"did you mean `{near[0]}`? {use}" if near else use


def similar(word: str, *, of: Collection[str]) -> str:
    """A hint: the name that may be meant, else all of them."""
    near = difflib.get_close_matches(word, of, n=1)
    return f"did you mean `{near[0]}`?" if near else f"use one of {listed(of)}"

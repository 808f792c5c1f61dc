"""A tree to a Recipe: schema, then rules; every problem gets the place where the user wrote the key."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import ValidationError

from appliance.errors import MOST_SHOWN
from appliance.recipe.messages import explain
from appliance.recipe.rules import broken_rules
from appliance.recipe.schema import SECTIONS, Recipe
from appliance.recipe.tree import Node, Problem, Refused

Path_ = tuple[str, ...]


def validate(tree: dict[str, Node], *, file: str, problems: list[Problem]) -> Recipe | None:
    """The recipe, or None with problems added. Rules are judged on what is left when faulty keys are taken out."""
    _drop_empty_sections(tree)
    faulty: set[Path_] = set()
    raw = _plain(tree, refused=faulty)
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        faulty |= _explain_all(error, tree=tree, file=file, problems=problems)
        try:
            recipe = Recipe.model_validate(_without(raw, faulty))
        except ValidationError:
            return None
    for broken in broken_rules(recipe):
        keys = [tuple(key.split(".")) for key in broken.keys]
        if not any(key[: len(bad)] == bad for key in keys for bad in faulty):
            where = _place(tree, keys, file=file)
            problems.append((f"{where}: {'.'.join(_first_written(tree, keys))}: {broken.message}", broken.hint))
    problems.sort(key=lambda problem: _line(problem[0], file=file))
    return recipe


def _line(message: str, *, file: str) -> tuple[int, int]:
    """Sorts by line of the recipe's own file; what stands elsewhere comes last, in the order found."""
    number = message.removeprefix(f"{file}:").partition(":")[0] if message.startswith(f"{file}:") else ""
    return (0, int(number)) if number.isdigit() else (1, 0)


def _drop_empty_sections(tree: dict[str, Node]) -> None:
    for name in SECTIONS:
        if name in tree and tree[name].value is None:
            del tree[name]


def _explain_all(error: ValidationError, *, tree: dict[str, Node], file: str, problems: list[Problem]) -> set[Path_]:
    """Adds a problem per error; returns the paths of the faulty keys. What nobody will see is not explained: each
    explanation looks for a similar name."""
    found = []
    for each in error.errors(include_url=False):
        path = tuple(str(part) for part in each["loc"])
        found.append((f"{_place(tree, [path], file=file)}: {'.'.join(path)}", path, each))
    found.sort(key=lambda one: _line(one[0], file=file))
    for number, (what, path, each) in enumerate(found):
        if number >= MOST_SHOWN:
            message, hint = each["msg"], ""
        else:
            message, hint = _unknown(path) if each["type"] == "extra_forbidden" else explain(each)
        problems.append((f"{what}: {message}", hint))
    return {path[:2] for _, path, _ in found}


def _unknown(path: Path_) -> Problem:
    section = SECTIONS.get(path[0]) if len(path) > 1 else None
    fields = section.model_fields if section else Recipe.model_fields
    near = difflib.get_close_matches(path[-1], fields, n=1)
    if near:
        return "unknown key", f"did you mean `{'.'.join((*path[:-1], near[0]))}`?"
    homes = [f"{name}.{path[-1]}" for name, kind in SECTIONS.items() if path[-1] in kind.model_fields]
    if homes:
        return "unknown key", f"did you mean `{homes[0]}`?"
    return "unknown key", "use one of " + ", ".join(f"`{name}`" for name in fields)


def _plain(tree: dict[str, Node], *, refused: set[Path_]) -> dict[str, Any]:
    """The tree as plain values, without those that were refused: their keys are added to the set."""

    def strip(value: Any, path: Path_) -> Any:
        if isinstance(value, dict):
            kept = {key: node for key, node in value.items() if node.value is not Refused.VALUE}
            refused.update((*path, key)[:2] for key in value.keys() - kept.keys())
            return {key: strip(node.value, (*path, key)) for key, node in kept.items()}
        if isinstance(value, list):
            return [strip(node.value, path) for node in value if node.value is not Refused.VALUE]
        return value

    return strip(tree, ())


def _without(raw: dict[str, Any], faulty: set[Path_]) -> dict[str, Any]:
    kept = {}
    for key, value in raw.items():
        if (key,) in faulty:
            continue
        kept[key] = value
        if isinstance(value, dict):
            kept[key] = {inner: item for inner, item in value.items() if (key, inner) not in faulty}
    return kept


def _find(tree: dict[str, Node], path: Path_) -> Node | None:
    node: Node | None = None
    level: Any = tree
    for key in path:
        if isinstance(level, list) and key.isdigit() and int(key) < len(level):
            node = level[int(key)]
        elif isinstance(level, dict) and key in level:
            node = level[key]
        else:
            return None
        level = node.value
    return node


def _first_written(tree: dict[str, Node], paths: list[Path_]) -> Path_:
    return next((path for path in paths if _find(tree, path)), paths[0])


def _place(tree: dict[str, Node], paths: list[Path_], *, file: str) -> str:
    node = _find(tree, _first_written(tree, paths))
    return node.place if node else file

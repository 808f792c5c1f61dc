"""A recipe file, what it extends and `--set` options become a Recipe, or every problem at once with its line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from appliance.errors import RecipeError
from appliance.recipe import library
from appliance.recipe.messages import explain
from appliance.recipe.rules import broken_rules
from appliance.recipe.schema import NOT_YET, SECTIONS, Recipe
from appliance.recipe.tree import MAX_BYTES, Node, Problem, parse

Path_ = tuple[str, ...]
_RESERVED_FOR_FILES = frozenset({"extends"})


def load_recipe(name_or_path: str, *, sets: Iterable[str] = ()) -> Recipe:
    """The resolved recipe: `extends` merged in and cleared, `--set` options applied last.

    name_or_path: a shipped recipe's name or a file.  sets: `dotted.key=value` each.
    Raises RecipeError with all problems.
    """
    path = library.find(name_or_path)
    problems: list[Problem] = []
    tree = _with_parent(_read(path, problems), path=path, problems=problems)
    for option in sets:
        _apply_set(tree, option, problems=problems)
    tree.setdefault("name", Node(path.stem, str(path)))
    recipe = _validate(tree, file=str(path), problems=problems)
    if problems:
        raise RecipeError(problems)
    assert recipe is not None  # only a problem stops it
    return recipe


def _read(path: Path, problems: list[Problem]) -> dict[str, Node]:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        problems.append((f"{path}: cannot be read: {error.strerror}", ""))
        return {}
    root, found = parse(raw, file=str(path))
    problems.extend(found)
    if isinstance(root.value, dict):
        return root.value
    if root.value is not None:
        problems.append((f"{root.place}: a recipe is a mapping of keys", "see `appliance recipes show reference`"))
    return {}


def _with_parent(tree: dict[str, Node], *, path: Path, problems: list[Problem]) -> dict[str, Node]:
    extends = tree.pop("extends", None)
    if extends is None or extends.value is None:
        return tree
    if not isinstance(extends.value, str):
        problems.append((f"{extends.place}: extends: expected the name or the path of a recipe", ""))
        return tree
    try:
        parent_path = library.find(extends.value, beside=path.parent)
    except RecipeError as error:
        problems.extend((f"{extends.place}: extends: {message}", hint) for message, hint in error.problems)
        return tree
    parent = _read(parent_path, problems)
    if "extends" in parent:
        place = parent["extends"].place
        problems.append((f"{place}: extends: {path} extends this file: one level only", "merge the two"))
        del parent["extends"]
    parent.pop("name", None)
    return _merged(parent, tree)


def _merged(below: dict[str, Node], above: dict[str, Node]) -> dict[str, Node]:
    """Mappings are merged key by key; anything else of `above` replaces what `below` has."""
    merged = dict(below)
    for key, node in above.items():
        old = below.get(key)
        if old is not None and isinstance(old.value, dict) and isinstance(node.value, dict):
            node = Node(_merged(old.value, node.value), node.place)
        elif old is not None and isinstance(old.value, dict) and node.value is None:
            node = old  # a section with nothing but comments
        merged[key] = node
    return merged


def _apply_set(tree: dict[str, Node], option: str, *, problems: list[Problem]) -> None:
    place = f"--set {option}"
    key, equals, text = option.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        problems.append((f"{place}: expected KEY=VALUE", "such as --set optimizer.learning_rate=1e-6"))
        return
    if path[0] in _RESERVED_FOR_FILES:
        problems.append((f"{place}: `{path[0]}` cannot be set here", "write it into a recipe file"))
        return
    node, found = parse(text.encode("utf-8", "surrogateescape"), file=place)
    problems.extend((message.replace(f"{place}:1: ", f"{place}: "), hint) for message, hint in found)
    _put(tree, path, value=node.value, place=place)


def _put(tree: dict[str, Node], path: Path_, *, value: Any, place: str) -> None:
    node = Node(_placed(value, place=place), place)
    for key in reversed(path[1:]):
        node = Node({key: node}, place)
    merged = _merged(tree, {path[0]: node})
    tree.clear()
    tree.update(merged)


def _placed(value: Any, *, place: str) -> Any:
    """The same value with every line in it replaced by the option: `--set` has no lines."""
    if isinstance(value, dict):
        return {key: Node(_placed(node.value, place=place), place) for key, node in value.items()}
    if isinstance(value, list):
        return [Node(_placed(node.value, place=place), place) for node in value]
    return value


def _validate(tree: dict[str, Node], *, file: str, problems: list[Problem]) -> Recipe | None:
    """The recipe, or None with problems added. Rules are judged on what is left when faulty keys are taken out."""
    _drop_empty_sections(tree)
    raw = _plain(tree)
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        faulty = _explain_all(error, tree=tree, file=file, problems=problems)
        rest = _without(raw, faulty)
        try:
            recipe = Recipe.model_validate(rest)
        except ValidationError:
            return None
    else:
        faulty = set()
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
    """Adds a problem per error; returns the paths of the faulty keys."""
    faulty: set[Path_] = set()
    for each in error.errors():
        path = tuple(str(part) for part in each["loc"])
        faulty.add(path[:2])
        where = _place(tree, [path], file=file)
        message, hint = _unknown(path) if each["type"] == "extra_forbidden" else explain(each)
        problems.append((f"{where}: {'.'.join(path)}: {message}", hint))
    return faulty


def _unknown(path: Path_) -> Problem:
    dotted = ".".join(path)
    if dotted in NOT_YET:
        return "not available in this version", "remove it"
    section = SECTIONS.get(path[0]) if len(path) > 1 else None
    fields = section.model_fields if section else Recipe.model_fields
    near = difflib.get_close_matches(path[-1], fields, n=1)
    if near:
        return "unknown key", f"did you mean `{'.'.join((*path[:-1], near[0]))}`?"
    homes = [f"{name}.{path[-1]}" for name, kind in SECTIONS.items() if path[-1] in kind.model_fields]
    if homes:
        return "unknown key", f"did you mean `{homes[0]}`?"
    return "unknown key", "use one of " + ", ".join(f"`{name}`" for name in fields)


def _plain(tree: dict[str, Node]) -> dict[str, Any]:
    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strip(node.value) for key, node in value.items()}
        return [strip(node.value) for node in value] if isinstance(value, list) else value

    return strip(tree)


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

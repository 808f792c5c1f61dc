"""A recipe file, what it extends and `--set` options become a Recipe, or every problem at once with its line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.errors import RecipeError
from appliance.recipe import library
from appliance.recipe.schema import SECTIONS, Recipe
from appliance.recipe.tree import MAX_BYTES, MAX_DEPTH, Node, Problem, Refused, odd_character, parse
from appliance.recipe.validate import validate

Path_ = tuple[str, ...]
MOST_PARENTS = 4
_RESERVED_FOR_FILES = frozenset({"extends"})


@dataclass(frozen=True)
class Setting:
    """One key given outside of the recipe. path: of the key.  node: its value, and where that was written."""

    path: Path_
    node: Node


def load_recipe(name_or_path: str, *, sets: Iterable[str] = (), settings: Iterable[Setting] = ()) -> Recipe:
    """The resolved recipe: `extends` merged in and cleared, then `settings`, then `--set` options.

    name_or_path: a shipped recipe's name or a file.  sets: `dotted.key=value` each.
    Raises RecipeError with all problems.
    """
    path = library.find(name_or_path)
    problems: list[Problem] = []
    tree = _with_parent(_read(path, problems), path=path, problems=problems)
    given = [read_option(option, place=f"--set {option}", problems=problems) for option in sets]
    for setting in (*settings, *given):
        if setting is not None and len(setting.path) > MAX_DEPTH:
            problems.append(
                (f"{setting.node.place[:80]}: more than {MAX_DEPTH} levels deep", "a recipe has three levels")
            )
        elif setting is not None:
            _put(tree, setting)
    tree.setdefault("name", Node(path.stem, str(path)))
    recipe = validate(tree, file=str(path), problems=problems)
    if problems:
        raise RecipeError(problems)
    assert recipe is not None  # only a problem stops it
    return recipe


def _read(path: Path, problems: list[Problem]) -> dict[str, Node]:
    """The top level of a file. Raises RecipeError when there is none; smaller problems are added to the list."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RecipeError([(f"{path}: cannot be read: {error.strerror}", "")]) from error
    root, found = parse(raw, file=str(path))
    if root is None:
        raise RecipeError([*problems, *found])
    problems.extend(found)
    if root.value is None:
        return {}
    if not isinstance(root.value, dict):
        message = f"{root.place}: a recipe is a mapping of keys"
        raise RecipeError([*problems, (message, "see `appliance recipes show reference`")])
    return root.value


def _with_parent(
    tree: dict[str, Node], *, path: Path, problems: list[Problem], above: tuple[Path, ...] = ()
) -> dict[str, Node]:
    """The tree with what it extends merged in below it. above: the files on the way here, which extend this one."""
    extends = tree.pop("extends", None)
    if extends is None or extends.value is None:
        return tree
    if not isinstance(extends.value, str):
        problems.append((f"{extends.place}: extends: expected the name or the path of a recipe", ""))
        return _without_complaints(tree, place=extends.place)
    try:
        parent_path = library.find(extends.value, beside=path.parent)
    except RecipeError as error:
        problems.extend((f"{extends.place}: extends: {message}", hint) for message, hint in error.problems)
        return _without_complaints(tree, place=extends.place)
    chain = (*above, path)
    if parent_path.resolve() in {each.resolve() for each in chain}:
        problems.append((f"{extends.place}: extends: {parent_path} extends this file", "one of them must not"))
        return _without_complaints(tree, place=extends.place)
    if len(chain) > MOST_PARENTS:
        message = f"{extends.place}: extends: more than {MOST_PARENTS} recipes, one below the other"
        problems.append((message, "merge some of them"))
        return _without_complaints(tree, place=extends.place)
    parent = _with_parent(_read(parent_path, problems), path=parent_path, problems=problems, above=chain)
    parent.pop("name", None)
    return _merged(parent, tree)


def _without_complaints(tree: dict[str, Node], *, place: str) -> dict[str, Node]:
    """The tree whose parent was refused: what the parent might have given is refused too, so that nobody misses it."""
    for name, section in SECTIONS.items():
        fields = {key: Node(Refused.VALUE, place) for key in section.model_fields}
        tree = _merged({name: Node(fields, place)}, tree)
    return tree


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


def read_option(option: str, *, place: str, problems: list[Problem]) -> Setting | None:
    """`dotted.key=value` as a setting, or None with a problem added. place: where messages say it was written."""
    key, equals, text = option.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path) or odd_character(key):
        problems.append((f"{place}: expected KEY=VALUE", "such as --set optimizer.learning_rate=1e-6"))
        return None
    if path[0] in _RESERVED_FOR_FILES:
        problems.append((f"{place}: `{path[0]}` cannot be set here", "write it into a recipe file"))
        return None
    if not text.strip():  # as `key:` in a file
        return Setting(path, Node(None, place))
    node, found = parse(text.encode("utf-8", "surrogatepass"), file=place)
    problems.extend((message.replace(f"{place}:1: ", f"{place}: "), hint) for message, hint in found)
    return Setting(path, Node(_placed(node.value, place=place) if node else Refused.VALUE, place))


def _put(tree: dict[str, Node], setting: Setting) -> None:
    node = setting.node
    for key in reversed(setting.path[1:]):
        node = Node({key: node}, node.place)
    merged = _merged(tree, {setting.path[0]: node})
    tree.clear()
    tree.update(merged)


def _placed(value: Any, *, place: str) -> Any:
    """The same value with every line in it replaced by the option: `--set` has no lines."""
    if isinstance(value, dict):
        return {key: Node(_placed(node.value, place=place), place) for key, node in value.items()}
    if isinstance(value, list):
        return [Node(_placed(node.value, place=place), place) for node in value]
    return value

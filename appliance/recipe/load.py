"""A recipe file, what it extends and `--set` options become a Recipe, or every problem at once with its line; and back.
Every problem gets the place where the user wrote the key."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from appliance.corrections.registry import correction_of
from appliance.errors import MOST_SHOWN, RecipeError
from appliance.recipe import library
from appliance.recipe.messages import explain
from appliance.recipe.rules import broken_rules
from appliance.recipe.schema import SECTIONS, Recipe
from appliance.recipe.text import FLOAT, MAX_BYTES, MAX_DEPTH, Node, Problem, Refused, odd_character, parse

Path_ = tuple[str, ...]
MOST_PARENTS = 4


@dataclass(frozen=True)
class Setting:
    """One key given outside of the recipe. path: of the key.  node: its value, and where that was written."""

    path: Path_
    node: Node


def load_recipe(
    name_or_path: str, *, sets: Iterable[str] = (), settings: Iterable[Setting] = (), by_rules: bool = True
) -> Recipe:
    """The resolved recipe: `extends` merged in and cleared, then `settings`, then `--set` options. name_or_path: a
    shipped recipe's name or a file.  sets: `dotted.key=value` each.  by_rules: whether it is asked if its keys go
    together: a run's own was, by the rules of its day.  Raises RecipeError with all problems."""
    path = library.find(name_or_path)
    problems: list[Problem] = []
    tree = _with_parent(read_tree(path, problems), path=path, problems=problems)
    given = [read_option(option, place=f"--set {option}", problems=problems) for option in sets]
    for setting in filter(None, (*settings, *given)):
        node = setting.node
        if len(setting.path) > MAX_DEPTH:
            problems.append((f"{node.place[:80]}: more than {MAX_DEPTH} levels deep", "a recipe has three levels"))
            continue
        for key in reversed(setting.path[1:]):
            node = Node({key: node}, node.place)
        tree = _merged(tree, {setting.path[0]: node})
    tree.setdefault("name", Node(path.stem, str(path)))
    recipe = _validated(tree, file=str(path), problems=problems, by_rules=by_rules)
    if problems:
        raise RecipeError(problems)
    return recipe


def files_of(recipe: Path) -> list[Path]:
    """The file of a recipe that could be loaded, and after it those that it extends."""
    files = [recipe]
    while (extends := read_tree(files[-1], []).get("extends")) is not None and extends.value is not None:
        files.append(library.find(str(extends.value), beside=files[-1].parent))
    return files


class _Writer(yaml.SafeDumper):
    """Puts into quotes what YAML 1.1 has as text and 1.2 as a number: `08`, `1e6`."""


_Writer.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"({FLOAT.pattern})\Z"), [*"+-.0123456789"])


def to_yaml(recipe: Recipe) -> str:
    """YAML that `load_recipe` reads back to the same Recipe: what a run keeps as its `recipe.yaml`."""
    return yaml.dump(to_plain(recipe), Dumper=_Writer, sort_keys=False, allow_unicode=True, width=120)


def to_plain(recipe: Recipe) -> dict[str, Any]:
    """JSON values, every key written out, in the order of the schema. What is usual for the loss and for the correction
    becomes values. Without a profile to make, what it would be made by is left out: no value of it would be true."""
    plain = recipe.model_dump(mode="json", exclude={"extends"})
    correction = recipe.correction
    hold = correction_of(correction.method, cap=correction.cap, bounds=correction.bounds)
    plain["correction"] |= {"cap": hold.cap, "bounds": list(hold.bounds) if hold.bounds else None}
    algorithm, has = recipe.algorithm, recipe.algorithm.loss.spec.bounds
    plain["algorithm"] |= {key: bound for key, bound in algorithm.bounds.items() if key in has}
    plain["algorithm"]["aggregate"] = str(algorithm.aggregated)
    if recipe.quantization.profile != "auto":
        for key in ("smoothing", "error_budget"):
            del plain["quantization"][key]
    return plain


# Files and options to a tree


def read_tree(
    path: Path, problems: list[Problem], *, what: str = "recipe", hint: str = "see `appliance recipes show reference`"
) -> dict[str, Node]:
    """The top level of a file. Raises RecipeError when there is none; smaller problems are added to the list."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RecipeError([(f"{path}: cannot be read: {error.strerror}", "")]) from error
    root, found = parse(raw, file=str(path))
    problems.extend(found)
    if root is None:
        raise RecipeError(problems)
    if root.value is None:
        return {}
    if not isinstance(root.value, dict):
        raise RecipeError([*problems, (f"{root.place}: a {what} is a mapping of keys", hint)])
    return root.value


def _with_parent(
    tree: dict[str, Node], *, path: Path, problems: list[Problem], above: tuple[Path, ...] = ()
) -> dict[str, Node]:
    """The tree with what it extends merged in below it. above: the files on the way here, which extend this one. What a
    refused parent might have given is refused too, so that nobody misses it."""
    extends = tree.pop("extends", None)
    if extends is None or extends.value is None:
        return tree
    chain = (*above, path)
    try:
        parent_path = _parent(extends.value, chain=chain)
    except RecipeError as error:
        problems.extend((f"{extends.place}: extends: {message}", hint) for message, hint in error.problems)
        refused = Node(Refused.VALUE, extends.place)
        sections = {name: dict.fromkeys(section.model_fields, refused) for name, section in SECTIONS.items()}
        return _merged({name: Node(fields, extends.place) for name, fields in sections.items()}, tree)
    parent = _with_parent(read_tree(parent_path, problems), path=parent_path, problems=problems, above=chain)
    parent.pop("name", None)
    return _merged(parent, tree)


def _parent(name_or_path: object, *, chain: tuple[Path, ...]) -> Path:
    """The file of `extends`. chain: from the recipe down to the file that extends it. Raises RecipeError."""
    if not isinstance(name_or_path, str):
        raise RecipeError([("expected the name or the path of a recipe", "")])
    parent = library.find(name_or_path, beside=chain[-1].parent)
    if parent.resolve() in {each.resolve() for each in chain}:
        raise RecipeError([(f"{parent} extends this file", "one of them must not")])
    if len(chain) > MOST_PARENTS:
        raise RecipeError([(f"more than {MOST_PARENTS} recipes, one below the other", "merge some of them")])
    return parent


def _merged(below: dict[str, Node], above: dict[str, Node]) -> dict[str, Node]:
    """Mappings are merged key by key; anything else of `above` replaces what `below` has, as does `val_sets: {}`."""
    merged = dict(below)
    for key, node in above.items():
        old = below.get(key)
        if old is not None and isinstance(old.value, dict):
            if isinstance(node.value, dict) and (node.value or key != "val_sets"):
                node = Node(_merged(old.value, node.value), node.place)
            elif node.value is None and key in SECTIONS:  # one with nothing but comments
                node = old
        merged[key] = node
    return merged


def read_option(option: str, *, place: str, problems: list[Problem]) -> Setting | None:
    """`dotted.key=value` as a setting, or None with a problem added. place: where messages say it was written."""
    key, equals, text = option.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path) or odd_character(key):
        problems.append((f"{place}: expected KEY=VALUE", "such as --set optimizer.learning_rate=1e-6"))
        return None
    if path[0] == "extends":
        problems.append((f"{place}: `extends` cannot be set here", "write it into a recipe file"))
        return None
    if not text.strip():  # as `key:` in a file
        return Setting(path, Node(None, place))
    node, found = parse(text.encode("utf-8", "surrogatepass"), file=place)
    problems.extend((message.replace(f"{place}:1: ", f"{place}: "), hint) for message, hint in found)
    if not found and (comment := _comment(text)):
        problems.append((f"{place}: `{comment[:40]}` would be a comment, and left out", "put the value into quotes"))
    return Setting(path, _placed(node or Node(Refused.VALUE, place), place=place))


def _comment(text: str) -> str:
    """What stands behind the value of a text that `parse` takes."""
    ends = [event.end_mark.index for event in yaml.parse(text, Loader=yaml.SafeLoader) if _is_last(event, text)]
    return text[max(ends, default=0) :].strip()


def _is_last(event: yaml.Event, text: str) -> bool:
    """Whether a value may end with it: a mapping or list without brackets ends where the next thing begins."""
    is_end = isinstance(event, yaml.CollectionEndEvent) and text[: event.end_mark.index].endswith(("]", "}"))
    return is_end or isinstance(event, yaml.ScalarEvent)


def _placed(node: Node, *, place: str) -> Node:
    """The same with every line in it replaced by the option: `--set` has no lines."""
    value = node.value
    if isinstance(value, dict):
        value = {key: _placed(each, place=place) for key, each in value.items()}
    elif isinstance(value, list):
        value = [_placed(each, place=place) for each in value]
    return Node(value, place)


# A tree to a recipe


def _validated(tree: dict[str, Node], *, file: str, problems: list[Problem], by_rules: bool) -> Recipe:
    """The recipe, with problems added. Rules are judged on what is left when faulty keys are taken out."""
    tree = {name: node for name, node in tree.items() if name not in SECTIONS or node.value is not None}
    faulty: set[Path_] = set()
    try:
        recipe = Recipe.model_validate(_plain(tree, faulty=faulty))
    except ValidationError as error:
        faulty |= _explain_all(error, tree=tree, file=file, problems=problems)
        recipe = Recipe.model_validate(_plain(tree, faulty=faulty))
    for broken in broken_rules(recipe) if by_rules else ():
        keys = [tuple(key.split(".")) for key in broken.keys]
        if not any(key[: len(bad)] == bad for key in keys for bad in faulty):
            written = next((key for key in keys if _find(tree, key)), keys[0])
            where = _place(tree, written, file=file)
            problems.append((f"{where}: {'.'.join(written)}: {broken.message}", broken.hint))
    problems.sort(key=lambda problem: line_of(problem[0], file=file))
    return recipe


def _plain(level: Any, *, faulty: set[Path_], path: Path_ = ()) -> Any:
    """Values without their places, and without those of faulty keys; the keys of refused values are added to these."""
    if isinstance(level, dict):
        kept = {}
        for key, node in level.items():
            at = (*path, key)
            if node.value is Refused.VALUE:
                faulty.add(at[:2])
            elif at not in faulty:
                kept[key] = _plain(node.value, faulty=faulty, path=at)
        return kept
    if isinstance(level, list):
        return [_plain(node.value, faulty=faulty, path=path) for node in level if node.value is not Refused.VALUE]
    return level


def _explain_all(error: ValidationError, *, tree: dict[str, Node], file: str, problems: list[Problem]) -> set[Path_]:
    """Adds a problem per error; returns the paths of the faulty keys. What nobody will see is not explained: each
    explanation looks for a similar name."""
    found = []
    for each in error.errors(include_url=False):
        if each["type"] == "too_short" and each["input"]:
            continue  # a list is short of its faulty values, which are told themselves
        path = tuple(str(part) for part in each["loc"] if part != "[key]")  # pydantic's mark: the key itself is meant
        place = _place(tree, path[:-1] if each["type"] == "missing" else path, file=file)
        found.append((f"{place}: {'.'.join(path)}", path, each))
    found.sort(key=lambda one: line_of(one[0], file=file))
    for number, (what, _, each) in enumerate(found):
        message, hint = explain(each) if number < MOST_SHOWN else (each["msg"], "")
        problems.append((f"{what}: {message}", hint))
    return {path[:2] for _, path, _ in found}


def line_of(message: str, *, file: str) -> tuple[int, int]:
    """Sorts by line of the recipe's own file; what stands elsewhere comes last, in the order found."""
    number = message.removeprefix(f"{file}:").partition(":")[0] if message.startswith(f"{file}:") else ""
    return (0, int(number)) if number.isdigit() else (1, 0)


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


def _place(tree: dict[str, Node], path: Path_, *, file: str) -> str:
    node = _find(tree, path)
    return node.place if node else file

"""A recipe file, what it extends and `--set` options become a Recipe, or every problem at once with its line; and back.
Every problem gets the place where the user wrote the key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from appliance.corrections.registry import correction_of
from appliance.errors import MOST_SHOWN, RecipeError, refuse_faults
from appliance.finding import Finding, fault
from appliance.recipe import library
from appliance.recipe.rules import RULES, judge
from appliance.recipe.schema import SECTIONS, Recipe
from appliance.recipe.text import (
    FLOAT,
    MAX_BYTES,
    MAX_DEPTH,
    Node,
    Refused,
    Scalar,
    in_yaml,
    odd_character,
    parse,
    scalar,
)
from appliance.settings.sections import Lora, Reward, ValSet
from appliance.terms.schemes import listed

Path_ = tuple[str, ...]
MOST_PARENTS = 4


@dataclass(frozen=True)
class Setting:
    """One key given outside of the recipe."""

    path: Path_
    """Path of the key, one name for each level."""
    node: Node
    """Value of the key, and the place where it was written."""


@dataclass(frozen=True)
class TypedRecipe:
    """A recipe as it was typed, right or wrong."""

    recipe: Recipe
    """Recipe of the keys that could be read, with the place of each; the other keys have their defaults."""
    faults: list[Finding]
    """What is wrong with the recipe, whatever the host, in the order of the file."""
    unreadable: frozenset[Path_]
    """Sections and keys that could not be read."""
    file: str
    """Path of the recipe, as the faults name it."""


def load_recipe(
    name_or_path: str, *, sets: Iterable[str] = (), settings: Iterable[Setting] = (), by_rules: bool = True
) -> Recipe:
    """Read a recipe as `read_recipe` does. Raises RecipeError with all problems."""
    typed = read_recipe(name_or_path, sets=sets, settings=settings, by_rules=by_rules)
    refuse_faults(typed.faults)
    return typed.recipe


def read_recipe(
    name_or_path: str, *, sets: Iterable[str] = (), settings: Iterable[Setting] = (), by_rules: bool = True
) -> TypedRecipe:
    """Read a recipe with `extends` merged in and cleared, then `settings`, then `--set` options. name_or_path: a
    shipped recipe's name or a file.  sets: `dotted.key=value` each.  by_rules: whether the rules about several keys are
    checked; the recipe that a run kept was checked by the rules of its day.  Raises RecipeError for a file that is not
    there, or no YAML mapping."""
    path = library.find(name_or_path)
    faults: list[Finding] = []
    tree = _with_parent(read_tree(path, faults), path=path, faults=faults)
    options = [read_option(option, place=f"--set {option}", faults=faults) for option in sets]
    for setting in filter(None, (*settings, *options)):
        node = setting.node
        if len(setting.path) > MAX_DEPTH:
            message, hint = f"more than {MAX_DEPTH} levels deep", "a recipe has three levels"
            faults.append(fault((), message, hint, where=node.place[:80]))
            continue
        for key in reversed(setting.path[1:]):
            node = Node({key: node}, node.place)
        tree = _merged(tree, {setting.path[0]: node})
    tree.setdefault("name", Node(path.stem, str(path)))
    return _validated(tree, file=str(path), faults=faults, by_rules=by_rules)


def files_of(recipe: Path) -> list[Path]:
    """List the file of a recipe that could be loaded, then the files that it extends."""
    files = [recipe]
    while (extends := read_tree(files[-1], []).get("extends")) is not None and extends.value is not None:
        files.append(library.find(str(extends.value), beside=files[-1].parent))
    return files


class _Writer(yaml.SafeDumper):
    """Puts into quotes what YAML 1.1 has as text and 1.2 as a number: `08`, `1e6`."""


_Writer.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"({FLOAT.pattern})\Z"), [*"+-.0123456789"])


def to_yaml(recipe: Recipe) -> str:
    """Write a recipe as YAML that `load_recipe` reads back to the same Recipe: a run keeps it as its `recipe.yaml`."""
    return yaml.dump(to_plain(recipe), Dumper=_Writer, sort_keys=False, allow_unicode=True, width=120)


def to_plain(recipe: Recipe) -> dict[str, Any]:
    """Turn a recipe into JSON values, with every key written out, in the order of the schema. Usual bounds of the loss
    and of the correction become values. Where no profile is made, the settings for making one are left out: no value of
    them would be true."""
    plain = recipe.model_dump(mode="json", exclude={"extends"})
    correction = recipe.correction
    hold = correction_of(correction.method, cap=correction.cap, bounds=correction.bounds)
    plain["correction"] |= {"cap": hold.cap, "bounds": list(hold.bounds) if hold.bounds else None}
    algorithm, has = recipe.algorithm, recipe.algorithm.loss.spec.bounds
    plain["algorithm"] |= {key: bound for key, bound in algorithm.bounds.items() if key in has}
    plain["algorithm"]["aggregate"] = str(algorithm.aggregated)
    if recipe.quantization.profile != "auto":
        for key in ("smoothing", "mismatch_budget"):
            del plain["quantization"][key]
    return plain


def is_written(recipe: Recipe, *, plain: object) -> bool:
    """Tell whether `plain` is this recipe as this version or an earlier one wrote it: a key that an earlier version did
    not have must have its default here.  plain: what YAML reads."""
    try:
        return to_plain(Recipe.model_validate(plain)) == to_plain(recipe)
    except ValidationError:
        return False


# Files and options to a tree


def read_tree(
    path: Path, faults: list[Finding], *, kind: str = "recipe", hint: str = "see `appliance recipes show reference`"
) -> dict[str, Node]:
    """Read the top level of a YAML file. Raises RecipeError when there is none; smaller faults are added to the
    list. kind: of file, as messages name it.  hint: where its keys are explained."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RecipeError([fault((str(path),), f"cannot be read: {error.strerror}")]) from error
    root, faults_of_text = parse(raw, file=str(path))
    faults.extend(faults_of_text)
    if root is None:
        raise RecipeError(faults)
    if root.value is None:
        return {}
    if not isinstance(root.value, dict):
        raise RecipeError([*faults, fault((), f"a {kind} is a mapping of keys", hint, where=root.place)])
    return root.value


def _with_parent(
    tree: dict[str, Node], *, path: Path, faults: list[Finding], above: tuple[Path, ...] = ()
) -> dict[str, Node]:
    """Merge the tree with what it extends, which lies below it. above: the files that lead here, each of which extends
    the next. Where the parent is refused, every key that it might have set is refused as well, so that no rule misses
    it."""
    extends = tree.pop("extends", None)
    if extends is None or extends.value is None:
        return tree
    chain = (*above, path)
    try:
        parent_path = _parent(extends.value, chain=chain)
    except RecipeError as error:
        faults += [fault(("extends",), finding.fact, finding.remedy, where=extends.place) for finding in error.findings]
        refused = Node(Refused.VALUE, extends.place)
        sections = {name: dict.fromkeys(section.model_fields, refused) for name, section in SECTIONS.items()}
        return _merged({name: Node(fields, extends.place) for name, fields in sections.items()}, tree)
    parent = _with_parent(read_tree(parent_path, faults), path=parent_path, faults=faults, above=chain)
    parent.pop("name", None)
    return _merged(parent, tree)


def _parent(name_or_path: object, *, chain: tuple[Path, ...]) -> Path:
    """Find the file of `extends`. chain: from the recipe down to the file that extends it. Raises RecipeError."""
    if not isinstance(name_or_path, str):
        raise RecipeError([fault((), "expected the name or the path of a recipe")])
    parent = library.find(name_or_path, beside=chain[-1].parent)
    if parent.resolve() in {each.resolve() for each in chain}:
        raise RecipeError([fault((), f"{parent} extends this file", "one of them must not")])
    if len(chain) > MOST_PARENTS:
        raise RecipeError([fault((), f"more than {MOST_PARENTS} recipes, one below the other", "merge some of them")])
    return parent


def _merged(below: dict[str, Node], above: dict[str, Node]) -> dict[str, Node]:
    """Merge mappings key by key; any other value of `above` replaces the one of `below`, and so does `val_sets: {}`."""
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


def read_option(option: str, *, place: str, faults: list[Finding]) -> Setting | None:
    """Read `dotted.key=value` as a setting; None where it is none, with a fault added to the list. place: where
    messages say it was written."""
    key, equals, text = option.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path) or odd_character(key):
        faults.append(fault((), "expected KEY=VALUE", "such as --set optimizer.learning_rate=1e-6", where=place))
        return None
    if path[0] == "extends":
        faults.append(fault((), "`extends` cannot be set here", "write it into a recipe file", where=place))
        return None
    if not text.strip():  # as `key:` in a file
        return Setting(path, Node(None, place))
    node, faults_of_text = parse(text.encode("utf-8", "surrogatepass"), file=place)
    faults.extend(replace(finding, where=place) for finding in faults_of_text)
    if not faults_of_text and (comment := _comment(text)):
        message = f"`{comment[:40]}` would be a comment, and left out"
        faults.append(fault((), message, "put the value into quotes", where=place))
    return Setting(path, _placed(node or Node(Refused.VALUE, place), place=place))


def _comment(text: str) -> str:
    """Return what follows the value in a text that `parse` takes."""
    ends = [event.end_mark.index for event in yaml.parse(text, Loader=yaml.SafeLoader) if _is_last(event, text)]
    return text[max(ends, default=0) :].strip()


def _is_last(event: yaml.Event, text: str) -> bool:
    """Tell whether a value may end with this event: a mapping or list without brackets ends where the next value
    begins."""
    is_end = isinstance(event, yaml.CollectionEndEvent) and text[: event.end_mark.index].endswith(("]", "}"))
    return is_end or isinstance(event, yaml.ScalarEvent)


def _placed(node: Node, *, place: str) -> Node:
    """Replace every place in a node by that of the option: `--set` has no lines."""
    value = node.value
    if isinstance(value, dict):
        value = {key: _placed(each, place=place) for key, each in value.items()}
    elif isinstance(value, list):
        value = [_placed(each, place=place) for each in value]
    return Node(value, place)


# A tree to a recipe


def _validated(tree: dict[str, Node], *, file: str, faults: list[Finding], by_rules: bool) -> TypedRecipe:
    """Make the recipe, and add the faults of its keys. Rules are checked on what is left when unreadable keys are taken
    out."""
    tree = {name: node for name, node in tree.items() if name not in SECTIONS or node.value is not None}
    tree = _without_replaced(tree)
    unreadable: set[Path_] = set()
    try:
        recipe = Recipe.model_validate(_plain(tree, unreadable=unreadable))
    except ValidationError as error:
        unreadable |= _explain_all(error, tree=tree, file=file, faults=faults)
        recipe = Recipe.model_validate(_plain(tree, unreadable=unreadable))
    places, shipped = _own_places(tree, file=file)
    recipe = recipe.at(places, shipped=shipped)
    if by_rules:
        faults += judge(RULES, recipe, unreadable=unreadable)
    return TypedRecipe(recipe, in_order(faults, file=file), frozenset(unreadable), file=file)


def _places(level: Scalar | list[Node] | dict[str, Node] | Refused, path: Path_ = ()) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, its place) for every key of a level and below it."""
    entries: Iterable[tuple[str, Node]] = ()
    if isinstance(level, dict):
        entries = level.items()
    elif isinstance(level, list):
        entries = ((str(number), node) for number, node in enumerate(level))
    for key, node in entries:
        yield ".".join((*path, key)), node.place
        yield from _places(node.value, (*path, key))


def _own_places(tree: dict[str, Node], *, file: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the place of each dotted key, and the name of the shipped recipe for keys that `file` takes over from one:
    nobody is to change a shipped recipe, so their place is that of their section in the file, or the file."""
    folder = f"{library.folder()}/"
    places, shipped = {"": file}, {}
    for key, place in _places(tree):
        if place.startswith(folder) and not file.startswith(folder):
            shipped[key] = Path(place.rpartition(":")[0]).stem
            place = places.get(key.rpartition(".")[0], file)
        places[key] = place
    return places, shipped


def _without_replaced(tree: dict[str, Node]) -> dict[str, Node]:
    """Drop keys of earlier versions that are null: the recipe of a run that set none has them."""
    for section, key in _REPLACED:
        node = tree.get(section)
        if node is not None and isinstance(node.value, dict) and key in node.value and node.value[key].value is None:
            rest = {name: value for name, value in node.value.items() if name != key}
            tree = {**tree, section: Node(rest, node.place)}
    return tree


def _plain(level: Any, *, unreadable: set[Path_], path: Path_ = ()) -> Any:
    """Return values without their places, and without unreadable keys, to which the keys of refused values are
    added."""
    if isinstance(level, dict):
        values = {}
        for key, node in level.items():
            at = (*path, key)
            if node.value is Refused.VALUE:
                unreadable.add(at[:2])
            elif at not in unreadable:
                values[key] = _plain(node.value, unreadable=unreadable, path=at)
        return values
    if isinstance(level, list):
        return [
            _plain(node.value, unreadable=unreadable, path=path) for node in level if node.value is not Refused.VALUE
        ]
    return level


def _explain_all(error: ValidationError, *, tree: dict[str, Node], file: str, faults: list[Finding]) -> set[Path_]:
    """Add a fault per error, and return the paths of the unreadable keys. What nobody will see is not explained: each
    explanation looks for a similar name."""
    errors = []
    for details in error.errors(include_url=False):
        if details["type"] == "too_short" and details["input"]:
            continue  # a list is short of its faulty values, which have errors of their own
        path = tuple(str(part) for part in details["loc"] if part != "[key]")  # pydantic's mark of a key
        place = _place(tree, path[:-1] if details["type"] == "missing" else path, file=file)
        errors.append((place, path, details))
    errors.sort(key=lambda placed: line_of(placed[0], file=file))
    for number, (place, path, details) in enumerate(errors):
        message, hint = explain(details) if number < MOST_SHOWN else (details["msg"], "")
        faults.append(fault((".".join(path),), message, hint, where=place))
    return {path[:2] for _, path, _ in errors}


def in_order(findings: Iterable[Finding], *, file: str) -> list[Finding]:
    """Sort findings by their lines in the file, one of those that read alike; those of other places come last, in their
    own order."""
    by_text: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        by_text.setdefault((finding.fact, finding.remedy), finding)
    return sorted(by_text.values(), key=lambda finding: line_of(finding.where, file=file))


def line_of(where: str, *, file: str) -> tuple[int, int]:
    """Return a sort key: the line of a place in the recipe's own file; other places come last."""
    number = where.removeprefix(f"{file}:") if where.startswith(f"{file}:") else ""
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


# pydantic's errors in our words: the fact and the remedy.

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

_REPLACED = {
    (
        "quantization",
        "error_budget",
    ): "use `quantization.mismatch_budget`, such as 0.01: a bound on the predicted mismatch, in "
    "nats per token, not on the error of a layer's outputs; finish a run that began with the old key with the version "
    "that began it"
}
"""Keys of earlier versions, with what to use now."""
_NESTED = {"rewards": Reward, "val_sets": ValSet, "lora": Lora}  # keys whose values have keys of their own


def explain(error: ErrorDetails) -> tuple[str, str]:
    """Explain one error of pydantic's as (message, hint)."""
    kind, value, path, context = error["type"], error["input"], error["loc"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return "unknown key", _REPLACED.get(path) or _similar_key([str(part) for part in path])
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
    return f"`{in_yaml(value)}`"


def _similar_key(path: list[str]) -> str:
    """Suggest where an unknown key may belong."""
    if len(path) > 2 and path[1] in _NESTED:
        return similar(path[-1], names=_NESTED[path[1]].model_fields)
    section = SECTIONS.get(path[0]) if len(path) > 1 else None
    fields = section.model_fields if section else Recipe.model_fields
    home = next((name for name, kind in SECTIONS.items() if path[-1] in kind.model_fields), "")
    near = difflib.get_close_matches(path[-1], fields, n=1)
    if near and (section or not home):  # a key without its section is that very key
        return f"did you mean `{'.'.join((*path[:-1], near[0]))}`?"
    return f"did you mean `{home}.{path[-1]}`?" if home else f"use one of {listed(fields)}"


def _leaving_out(path: tuple[int | str, ...]) -> str:
    """Say how to leave a key without a value: not every key takes null. Empty for what is no key of a recipe."""
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
        return f'put it in quotes: "{in_yaml(value)}"'
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


def similar(word: str, *, names: Collection[str]) -> str:
    """Give a hint: the name that may be meant, else all of them."""
    near = difflib.get_close_matches(word, names, n=1)
    return f"did you mean `{near[0]}`?" if near else f"use one of {listed(names)}"

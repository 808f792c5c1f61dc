"""A comparison as a user writes it: YAML text to a Comparison, or every problem at once with its line.

recipe: arithmetic-tiny-int8        # a shipped recipe's name, or a file beside this one
set:                                # for all arms, and for each arm: a mapping of dotted keys, or KEY=VALUE each
  trainer.steps: 20
  task.train_size: 192              # leaves enough problems for the validation
arms:
  bf16: [rollout.scheme=bf16]
  int8-acr: {correction.method: acr}
seeds: [0, 1, 2]
baseline: bf16
against: {}                         # of an arm that is not compared with the baseline: the other arm
validation: 2000                    # problems of the final validation
margin: 0.03                        # a mean reward this far from the baseline's is as good
"""

from __future__ import annotations

import itertools
import json
import os.path
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from appliance.errors import RecipeError
from appliance.files import Frozen
from appliance.finding import Finding, fault
from appliance.recipe import library
from appliance.recipe.load import Setting, explain, in_order, read_option, read_tree, shown, similar
from appliance.recipe.schema import NAME_PATTERN
from appliance.recipe.text import Node, Refused

FOLDER = "comparisons"
_SUFFIX = ".yaml"
_GIVEN_ELSEWHERE = {
    "extends": "write it into a recipe file",
    "name": "a run is named by its arm and seed",
    "seed": "set `seeds` instead",
    "task.val_size": "set `validation` instead",
    "task.val_sets": "a comparison validates once, on `validation` problems",
}
Seed_ = Annotated[int, Field(ge=0, lt=2**31)]


class _File(Frozen):
    """Keys of the file and what they may hold; the settings in `set` and `arms` are read from the tree, with their
    lines."""

    recipe: str = Field(min_length=1)
    set: Any = None
    arms: dict[str, Any] = Field(min_length=1)
    seeds: Annotated[tuple[Seed_, ...], Field(strict=False, min_length=1)]
    baseline: str = Field(min_length=1)
    against: dict[str, str] = Field(default_factory=dict)
    validation: int = Field(2000, ge=1)
    margin: float = Field(0.03, gt=0)


@dataclass(frozen=True)
class Arm:
    name: str
    place: str
    settings: tuple[Setting, ...]
    """Settings in the order in which they apply: those of all arms, the arm's own, the size of the validation."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Settings as `dotted.key=value`; of a key that is given twice, the value that counts."""
        values = {".".join(setting.path): _plain(setting.node) for setting in self.settings}
        return tuple(
            f"{dotted}={value if isinstance(value, str) else json.dumps(value)}" for dotted, value in values.items()
        )


@dataclass(frozen=True)
class Comparison:
    name: str
    file: Path
    recipe: Path
    """File of the recipe."""
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    baseline: str
    validation: int
    margin: float
    """Margin of a mean reward, in its unit."""
    against: Mapping[str, str] = field(default_factory=dict)
    """Arm that each arm is compared with, where that is not the baseline."""


def find_comparison(name_or_path: str) -> Path:
    """Find the file of a comparison by its name, where it is a shipped one, or by its path. Raises RecipeError when
    there is none."""
    shipped = library.folder().parent / FOLDER / f"{name_or_path}{_SUFFIX}"
    if "/" not in name_or_path and os.path.isfile(shipped):  # unlike Path.is_file it takes any text
        return shipped
    if os.path.isfile(name_or_path):
        return Path(name_or_path)
    names = sorted(path.stem for path in shipped.parent.glob(f"*{_SUFFIX}"))
    hint = f"give a file, or one of the shipped: {', '.join(names)}" if names else "give a file"
    raise RecipeError([fault((name_or_path,), "no such comparison", hint)])


def load_comparison(name_or_path: str) -> Comparison:
    """Load a comparison. Raises RecipeError with all problems of the file, in the order of its lines. The recipes of
    the arms are not loaded."""
    path = find_comparison(name_or_path)
    faults: list[Finding] = []
    tree = read_tree(path, faults, kind="comparison", hint="see docs/experiments.md")
    read = recipe = None
    try:
        read = _File.model_validate({key: _plain(node) for key, node in tree.items()})
    except ValidationError as error:
        faults += [_explained(details, tree=tree, file=str(path)) for details in error.errors()]
    shared = _settings(tree.get("set"), key="set", faults=faults)
    arm_nodes = tree["arms"].value if "arms" in tree else None
    arms = [
        Arm(name, arm_node.place, tuple(_settings(arm_node, key=f"arms.{name}", faults=faults)))
        for name, arm_node in (arm_nodes.items() if isinstance(arm_nodes, dict) else ())
    ]
    node = tree.get("recipe")
    if node is not None and isinstance(node.value, str):
        try:
            recipe = library.find(node.value, beside=path.parent)
        except RecipeError as error:
            faults += [fault(("recipe",), finding.fact, finding.remedy, where=node.place) for finding in error.findings]
    faults += _wrong_names(tree, name=path.stem, file=str(path))
    if faults:
        raise RecipeError(in_order(faults, file=str(path)))
    assert read is not None and recipe is not None  # only a fault stops them
    size = Setting(("task", "val_size"), Node(read.validation, _place(tree, "validation", file=str(path))))
    return Comparison(
        name=path.stem,
        file=path,
        recipe=recipe,
        arms=tuple(Arm(arm.name, arm.place, (*shared, *arm.settings, size)) for arm in arms),
        seeds=read.seeds,
        baseline=read.baseline,
        validation=read.validation,
        margin=read.margin,
        against=read.against,
    )


def _explained(error: Any, *, tree: dict[str, Node], file: str) -> Finding:
    dotted = ".".join(map(str, error["loc"]))
    key = str(error["loc"][0])
    if error["type"] == "missing":
        return fault((key,), "the key is missing", _EXAMPLES[key], where=file)
    if error["type"] == "extra_forbidden":
        return fault((key,), "unknown key", similar(key, names=_File.model_fields), where=tree[key].place)
    return fault((dotted,), *explain(error), where=_place(tree, key, file=file))


_EXAMPLES = {
    "recipe": "such as `recipe: arithmetic-tiny-int8`",
    "arms": "a mapping of names to settings, such as `bf16: [rollout.scheme=bf16]`",
    "seeds": "such as `seeds: [0, 1, 2]`",
    "baseline": "the arm that the others are compared with",
}


def _plain(node: Node) -> Any:
    if isinstance(node.value, dict):
        return {key: _plain(each) for key, each in node.value.items()}
    if isinstance(node.value, list):
        return [_plain(each) for each in node.value]
    return None if node.value is Refused.VALUE else node.value


def _place(tree: dict[str, Node], key: str, *, file: str) -> str:
    return tree[key].place if key in tree else file


def _settings(node: Node | None, *, key: str, faults: list[Finding]) -> list[Setting]:
    """Read settings from a list of KEY=VALUE or a mapping of dotted keys; nothing at all is an arm that changes
    nothing."""
    if node is None or node.value is None or node.value is Refused.VALUE:
        return []
    read: list[Setting | None] = []
    if isinstance(node.value, dict):
        read += [Setting(tuple(dotted.split(".")), each) for dotted, each in node.value.items()]
    elif isinstance(node.value, list):
        for item in node.value:
            if isinstance(item.value, str) and "=" in item.value:
                read.append(read_option(item.value, place=item.place, faults=faults))
            elif item.value is not Refused.VALUE:
                message = f"expected KEY=VALUE, got {shown(_plain(item))}"
                faults.append(fault((key,), message, "such as `rollout.scheme=bf16`", where=item.place))
    else:
        hint = "such as `[rollout.scheme=bf16]`, or `{rollout.scheme: bf16}`"
        faults.append(fault((key,), f"expected settings, got {shown(_plain(node))}", hint, where=node.place))
    settings = [setting for setting in read if setting is not None]
    for dotted, place in (each for setting in settings for each in _given_elsewhere(setting.path, setting.node)):
        faults.append(fault((key,), f"`{dotted}` cannot be set here", _GIVEN_ELSEWHERE[dotted], where=place))
    return settings


def _given_elsewhere(path: tuple[str, ...], node: Node) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, its place) of what cannot be set here, at the path, above it or in the mapping there."""
    dotted = next((each for each in itertools.accumulate(path, "{}.{}".format) if each in _GIVEN_ELSEWHERE), None)
    if dotted is not None:
        yield dotted, node.place
    elif isinstance(node.value, dict):
        for key, each in node.value.items():
            yield from _given_elsewhere((*path, key), each)


def _wrong_names(tree: dict[str, Node], *, name: str, file: str) -> Iterator[Finding]:
    """Yield what is wrong with names: of the file, of arms and in what refers to arms. A value of the wrong kind has a
    fault of its own."""
    hint = "use letters, digits, `.`, `_` and `-`, at most 80 with the seed, no space or slash"
    if not NAME_PATTERN.fullmatch(name):
        yield fault((), f"the text `{name}` is not a name for a comparison", f"rename the file: {hint}", where=file)
    arms, seeds, baseline = (_plain(tree[key]) if key in tree else None for key in ("arms", "seeds", "baseline"))
    arms = arms if isinstance(arms, dict) else {}
    seeds = [seed for seed in seeds if isinstance(seed, int)] if isinstance(seeds, list) else []
    for arm in arms:
        if not NAME_PATTERN.fullmatch(run_name(arm, seed=max(seeds, default=0))):
            yield fault(("arms",), f"the text `{arm}` is not a name", hint, where=tree["arms"].value[arm].place)
    if len(set(seeds)) < len(seeds):
        yield fault(("seeds",), "a seed is named twice", "name each once", where=tree["seeds"].place)
    if arms and isinstance(baseline, str) and baseline not in arms:
        similar_arm = similar(baseline, names=arms)
        yield fault(("baseline",), f"no arm is called `{baseline}`", similar_arm, where=tree["baseline"].place)
    if arms:
        yield from _wrong_pairs(tree, arms=arms, baseline=baseline)


def _wrong_pairs(tree: dict[str, Node], *, arms: Mapping[str, Any], baseline: object) -> Iterator[Finding]:
    """Yield what is wrong with `against`."""
    key, against = ("against",), _plain(tree["against"]) if "against" in tree else None
    for arm, other in against.items() if isinstance(against, dict) else ():
        place = tree["against"].value[arm].place
        for name in (arm, other):
            if isinstance(name, str) and name not in arms:
                yield fault(key, f"no arm is called `{name}`", similar(name, names=arms), where=place)
        if arm in (other, baseline):
            hint = (
                "name another arm"
                if arm == other
                else "it is the arm that others are compared with: give another `baseline`"
            )
            yield fault(key, f"`{arm}` cannot be compared with `{other}`", hint, where=place)
        elif isinstance(other, str) and other in against and other != baseline:
            hint = "compare both with one arm: a chain of differences ends at no baseline"
            yield fault(key, f"`{arm}` is compared with `{other}`, which has its own", hint, where=place)


def run_name(arm: str, *, seed: int) -> str:
    """Return the name of a run's folder in the comparison's."""
    return f"{arm}-seed{seed}"

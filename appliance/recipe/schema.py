"""What a user types: the Recipe. Typed, nothing extra allowed, every key with its default and what it means.

`python -m appliance.recipe.schema` prints it as `recipes/reference.yaml`. Rules that concern several keys
at once are in `recipe.rules`. Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import Enum
from typing import Self

from pydantic import Field, PrivateAttr
from pydantic.fields import FieldInfo

from appliance.finding import Finding
from appliance.settings.sections import (
    NAME_PATTERN,
    Algorithm,
    Batch,
    Checkpoint,
    Cluster,
    Correction,
    Guard,
    Logging,
    Model,
    Optimizer,
    Quantization,
    Rollout,
    Section,
    Task,
    Trainer,
)
from appliance.terms.devices import Topology


class Recipe(Section):
    """One training, as a user describes it."""

    name: str = Field("recipe", pattern=f"^{NAME_PATTERN.pattern}$")
    """name of the recipe and of its runs; left out: the file's name"""
    extends: str | None = None
    """shipped recipe or file whose keys are used wherever this file has none"""
    seed: int = Field(0, ge=0, lt=2**31)
    """seed of sampling and shuffling"""
    model: Model = Model()
    task: Task = Task()
    rollout: Rollout = Rollout()
    quantization: Quantization = Quantization()
    correction: Correction = Correction()
    algorithm: Algorithm = Algorithm()
    optimizer: Optimizer = Optimizer()
    batch: Batch = Batch()
    trainer: Trainer = Trainer()
    cluster: Cluster = Cluster()
    guard: Guard = Guard()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()

    _places: dict[str, str] = PrivateAttr(default_factory=dict)
    """Places where the user wrote each dotted key, or would write it where a shipped recipe has it: `file:line` or an
    option; that of the empty key is the file."""
    _shipped: dict[str, str] = PrivateAttr(default_factory=dict)
    """Names of the shipped recipes whose values the user's file takes over, by key."""

    def __eq__(self, other: object) -> bool:
        """Compare values: it does not count where they were written."""
        return isinstance(other, Recipe) and dict(self) == dict(other)

    def at(self, places: Mapping[str, str], *, shipped: Mapping[str, str]) -> Self:
        """Set the places of the keys, and which of them have the value of a shipped recipe."""
        self._places.update(places)
        self._shipped.update(shipped)
        return self

    def placed(self, finding: Finding) -> Finding:
        """Place a finding at the first of its keys that the user wrote or takes over from a shipped recipe; a fault of
        what nobody wrote is the file's."""
        written = next((key for key in finding.keys if key in self._places), None)
        if written is not None:
            others = (key for key in finding.keys if key != written)
            source = f" (`{self._shipped[written]}` sets it)" if written in self._shipped else ""
            message, where = f"{finding.message}{source}", self._places[written]
            return replace(finding, keys=(written, *others), message=message, where=where)
        return replace(finding, where=self._places.get("", "")) if finding.is_fault else finding

    @property
    def topology(self) -> Topology:
        return Topology(
            nodes=self.cluster.nodes,
            gpus_per_node=self.cluster.gpus_per_node,
            tensor_parallel=self.rollout.tensor_parallel,
            sequence_parallel=self.trainer.sequence_parallel,
        )


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Recipe.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}


NAMED = {"model": {"builtin": "tiny-arithmetic"}, "trainer": {"steps": 40}}
"""Examples of the keys that have no default, in their sections."""


# The reference.

HEAD = """\
# Every key of a recipe with its default, and what it means.
# Two choices have no default: one of `model.path` and `model.builtin`, and one of `trainer.steps` and
# `trainer.epochs`, must be given. Here `model.builtin` and `trainer.steps` are.
# Scalars follow YAML 1.2: `1e-6` is a number, `on` is text. Anchors, aliases and duplicate keys are refused.
"""
EXAMPLES = {"name": "reference"} | {f"{name}.{key}": keys[key] for name, keys in NAMED.items() for key in keys}


def reference() -> str:
    """Return the whole of `recipes/reference.yaml`."""
    keys = {name: field for name, field in Recipe.model_fields.items() if name not in SECTIONS}
    parts = ["\n".join(_lines(keys, section=""))]
    for name, section in SECTIONS.items():
        head = [f"# {section.__doc__}", f"{name}:"]
        parts.append("\n".join([*head, *(f"  {line}" for line in _lines(section.model_fields, section=f"{name}."))]))
    return "\n".join([HEAD, *(f"{part}\n" for part in parts)])


def _lines(fields: Mapping[str, FieldInfo], *, section: str) -> Iterator[str]:
    """Yield a line per key; what the keys mean begins in one column."""
    written = {name: f"{name}: {_yaml(EXAMPLES.get(section + name, field.default))}" for name, field in fields.items()}
    width = max(map(len, written.values()))
    for name, field in fields.items():
        yield f"{written[name]:<{width}}  # {field.description}"


def _yaml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value.value if isinstance(value, Enum) else value).replace("e-0", "e-")


if __name__ == "__main__":
    sys.stdout.write(reference())

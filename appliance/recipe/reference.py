"""`recipes/reference.yaml`, made of the schema: `python -m appliance.recipe.reference >recipes/reference.yaml`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from enum import Enum

from pydantic.fields import FieldInfo

from appliance.recipe.schema import SECTIONS, Recipe

HEAD = """\
# Every key of a recipe with its default, and what it means.
# Only `model.builtin` and `trainer.steps` have no default: one of `model.path` and `model.builtin`, and one of
# `trainer.steps` and `trainer.epochs`, must be given.
# Scalars follow YAML 1.2: `1e-6` is a number, `on` is text. Anchors, aliases and duplicate keys are refused.
"""
EXAMPLES = {"name": "reference", "model.builtin": "tiny-arithmetic", "trainer.steps": 40}


def reference() -> str:
    """The whole file."""
    keys = {name: field for name, field in Recipe.model_fields.items() if name not in SECTIONS}
    parts = ["\n".join(_lines(keys, section=""))]
    for name, section in SECTIONS.items():
        head = [f"# {section.__doc__}", f"{name}:"]
        parts.append("\n".join([*head, *(f"  {line}" for line in _lines(section.model_fields, section=f"{name}."))]))
    return "\n".join([HEAD, *(f"{part}\n" for part in parts)])


def _lines(fields: Mapping[str, FieldInfo], *, section: str) -> Iterator[str]:
    """A line per key; what the keys mean begins in one column."""
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

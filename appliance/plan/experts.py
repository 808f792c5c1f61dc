"""Whether an engine quantises a model's experts. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from appliance.record.plan import ModelPlan
from appliance.terms.families import EXPERTS
from appliance.terms.shapes import read_shape

_MOST_LAYERS = 1024  # that are asked for; what is larger is not a model's number of layers


def layers_with_experts(model: ModelPlan) -> int:
    """Number of layers of a model with experts, by its config.json; 0 without experts, and where none is at hand."""
    shape = None if model.builtin else read_shape(Path(model.path) / "config.json")
    return max(1, shape.layers) if shape and shape.experts else 0


def quantises_experts(ignore: Sequence[str], *, layers: int) -> bool:
    """Whether a quantised engine has experts among what it quantises. layers: as layers_with_experts."""
    return layers > 0 and not keeps_experts(ignore, layers=layers)


def keeps_experts(ignore: Sequence[str], *, layers: int) -> bool:
    """Whether `quantization.ignore` names the experts of every layer, as vLLM matches names. layers: >= 1."""
    names = (f"model.layers.{layer}.{EXPERTS}" for layer in range(min(layers, _MOST_LAYERS)))
    return all(any(_names(entry, name) for entry in ignore) for name in names)


def _names(entry: str, name: str) -> bool:
    if not entry.startswith("re:"):
        return entry == name
    try:
        return re.match(entry.removeprefix("re:"), name) is not None
    except re.error:  # the engine says so
        return False

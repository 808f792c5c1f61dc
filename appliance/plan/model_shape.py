"""The sizes of a plan's model, from what is on this host: nothing is fetched, and nothing is made."""

from __future__ import annotations

from pathlib import Path

from appliance import hub
from appliance.gguf.source import gguf_facts
from appliance.record.plan import WeightsPlan
from appliance.settings.sections import Model
from appliance.tasks.library import BUILT_IN_MODELS
from appliance.terms.shapes import KNOWN, ModelShape, read_shape


def model_shape(model: Model, *, weights: WeightsPlan) -> ModelShape | None:
    """Return the sizes of a model: by our own table for a built-in one, else by its config.json or GGUF file where that
    is on this host, else by its name, where we know it. None where all of these fail."""
    if model.builtin:
        return BUILT_IN_MODELS[model.builtin].shape
    if weights.gguf:
        return gguf_facts(Path(weights.gguf)).shape
    folder = weights.folder or hub.cached_snapshot(weights.hub_name)
    return (read_shape(folder / "config.json") if folder else None) or KNOWN.get(weights.hub_name)

"""The sizes of a plan's model, from what is on this host: nothing is fetched, and nothing is made."""

from __future__ import annotations

from pathlib import Path

from appliance import hub
from appliance.gguf.source import gguf_facts
from appliance.record.plan import ModelPlan
from appliance.tasks.library import BUILT_IN_MODELS
from appliance.terms.shapes import KNOWN, ModelShape, read_shape


def model_shape(model: ModelPlan) -> ModelShape | None:
    """By our own table for a built-in model, else by its config.json or GGUF file where that is on this host, else by
    its name, where we know it. None where all of them say nothing."""
    if model.builtin:
        return BUILT_IN_MODELS[model.builtin].shape
    if model.gguf:
        return gguf_facts(Path(model.gguf)).shape
    if model.path.startswith("/"):
        return read_shape(Path(model.path) / "config.json") or (KNOWN.get(model.source) if model.is_pinned else None)
    cached = hub.cached_snapshot(model.source)
    return (read_shape(cached / "config.json") if cached else None) or KNOWN.get(model.source)

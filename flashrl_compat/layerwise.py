"""vLLM's layerwise reload under FLASHRL_CONFIG: for a model of ours it begins and ends a proven update.

vLLM's own weight transfer and SkyRL's, `reload_weights` and prime-rl enter a reload by these two functions.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch.nn import Module
from vllm.model_executor.model_loader.reload import layerwise

from appliance.engine.ways_in import ways_into
from appliance.patch import Patch, apply_patch

BEGINS = Patch(
    name="flashrl-reload-begins",
    target="vllm.model_executor.model_loader.reload.layerwise:initialize_layerwise_reload",
    why="a reload records nowhere that the weights are half-updated, and compares nothing with what the model has",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/model_executor/model_loader/reload/layerwise.py",
    distribution="vllm",
    sources={
        "0.28.0": "0487a168bbd9083ffe48ba25e65f2006aa4540e134e45c9c087bc2672a1a588a",
        "0.29.0": "0487a168bbd9083ffe48ba25e65f2006aa4540e134e45c9c087bc2672a1a588a",
        "0.30.0": "0487a168bbd9083ffe48ba25e65f2006aa4540e134e45c9c087bc2672a1a588a",
        "0.31.0": "4c6218fa7fce5c7df7ce4fc0a909d95ba6cca23ed59bb64896c68bd24ed65f1a",
    },
    remove_when="vLLM has hooks around a layerwise reload",
)
ENDS = Patch(
    name="flashrl-reload-ends",
    target="vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_reload",
    why="a layer that is not complete is filled from memory that nobody wrote, with a line for debugging",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/model_executor/model_loader/reload/layerwise.py",
    distribution="vllm",
    sources={
        "0.28.0": "10b5e19091c0ff524c603f9ad2f6b17e5102baa545f921695473cb7427c69df9",
        "0.29.0": "10b5e19091c0ff524c603f9ad2f6b17e5102baa545f921695473cb7427c69df9",
        "0.30.0": "10b5e19091c0ff524c603f9ad2f6b17e5102baa545f921695473cb7427c69df9",
        "0.31.0": "10b5e19091c0ff524c603f9ad2f6b17e5102baa545f921695473cb7427c69df9",
    },
    remove_when="vLLM has hooks around a layerwise reload",
)

_ORIGINALS: dict[str, Callable[..., None]] = {}


def patch_layerwise() -> None:
    """Patch the functions before a trainer's worker extension is imported, which may hold the functions by name. Raises
    PatchError."""
    if not _ORIGINALS:
        for patch, replacement in ((BEGINS, _begins), (ENDS, _ends)):
            apply_patch(patch, replacement)
    route()


def route() -> None:
    """Replace the functions in modules that hold one of them by name; our own modules keep vLLM's."""
    for name, original in _ORIGINALS.items():
        for module in list(sys.modules.values()):
            held = getattr(module, "__dict__", {})  # not getattr: some modules import what is read from them
            if held.get(name) is original and not module.__name__.startswith("appliance."):
                held[name] = getattr(layerwise, name)


def _begins(original: Callable[[Module], None]) -> Callable[[Module], None]:
    _ORIGINALS[original.__name__] = original

    @functools.wraps(original)
    def initialize_layerwise_reload(model: Module) -> None:
        ways = ways_into(model)
        if ways is None:
            original(model)
        else:
            ways.begin("a layerwise reload")

    return initialize_layerwise_reload


def _ends(original: Callable[..., None]) -> Callable[..., None]:
    _ORIGINALS[original.__name__] = original

    @functools.wraps(original)
    def finalize_layerwise_reload(model: Module, model_config: Any) -> None:
        ways = ways_into(model)
        if ways is None:
            original(model, model_config)
        else:
            ways.finish()

    return finalize_layerwise_reload

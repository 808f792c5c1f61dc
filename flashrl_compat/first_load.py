"""The first load of an engine under FLASHRL_CONFIG, compared with what the model needs, in whichever format of vLLM's
own loader it is read. Engines of ours have their own loader for it (appliance/engine/first_load.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.nn import Module

from appliance.engine.first_load import checked_first_load
from appliance.patch import Patch, apply_patch

FIRST_LOAD = Patch(
    name="flashrl-first-load",
    target="vllm.model_executor.model_loader.default_loader:DefaultModelLoader.load_weights",
    why=(
        "a fused layer counts as loaded once one of its parts has come, and every layer with a quantisation method "
        "without any: what a checkpoint lacks is memory as it was found"
    ),
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/model_executor/model_loader/default_loader.py",
    distribution="vllm",
    sources={
        "0.28.0": "3b75b4578248dbd177af43ac84d332b09b12aa6b0f69691a0eca9d3f487c9f49",
        "0.29.0": "3b75b4578248dbd177af43ac84d332b09b12aa6b0f69691a0eca9d3f487c9f49",
        "0.30.0": "3b75b4578248dbd177af43ac84d332b09b12aa6b0f69691a0eca9d3f487c9f49",
        "0.31.0": "7554b6d2d7ac4a3e7e866cb91958fc6d592ed75a36d98775965926f476ac7f71",
    },
    remove_when="vLLM's own check of a load counts the elements that each layer got",
)


def patch_first_load() -> None:
    """Patch the first load. Raises PatchError."""
    apply_patch(FIRST_LOAD, _checked)


def _checked(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def load_weights(self: Any, model: Module, model_config: Any) -> None:
        with checked_first_load(model, model_config=model_config):
            original(self, model, model_config)

    return load_weights

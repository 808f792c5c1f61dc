"""vLLM's loader for checkpoints on disk, with the profile's smoothing folded in.

Selected by `load_format=appliance`. It reads what vLLM's own `auto` reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from appliance.quant.profile import Smoothing, fold, load_smoothing, require_all_folded
from appliance.terms.settings import METHOD_NAME, quantisation_from_config

LOAD_FORMAT = "appliance"


def smoothing_of(model_config: Any) -> Smoothing:
    """Load the smoothing of the profile that an engine was configured with; none changes nothing. model_config: vLLM's.

    Raises EngineError when the profile cannot be read.
    """
    config = getattr(model_config.hf_config, "quantization_config", None)
    if not config or config.get("quant_method") != METHOD_NAME:
        return Smoothing()
    profile = quantisation_from_config(config).profile
    return load_smoothing(Path(profile)) if profile else Smoothing()


@register_model_loader(LOAD_FORMAT)
class SmoothingLoader(DefaultModelLoader):
    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(dataclasses.replace(load_config, load_format="auto"))

    def get_all_weights(self, model_config: Any, model: Module) -> Generator[tuple[str, Tensor], None, None]:
        """Yield (name, tensor) of the checkpoint, after smoothing; the tensors of an update are not changed, as the
        update smooths them itself. Raises EngineError for a profile of another model."""
        from appliance.engine.ways_in import ways_into  # slow, and where there is an update it is there

        smoothing = Smoothing() if ways_into(model) else smoothing_of(model_config)
        names = set()
        for name, tensor in super().get_all_weights(model_config, model):
            names.add(name)
            yield name, fold(name, tensor, smoothing=smoothing)
        require_all_folded(names, smoothing=smoothing)

"""How vLLM builds each layer under our quantisation method: the settings of one engine, dispatched by kind of layer.

Embeddings, `lm_head`, norms and routers stay as the checkpoint has them, whatever the scheme.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.utils import (
    check_equal_or_regex_match,
    should_ignore_layer,
)
from vllm.model_executor.layers.utils import MOE_LAYER_ROUTER_GATE_SUFFIXES
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from appliance.engine.fp32_head import Fp32HeadMethod
from appliance.engine.known_layers import layer_name, require_known_architecture, require_known_layer
from appliance.engine.methods import experts_method, linear_method
from appliance.errors import EngineError
from appliance.quant.files import kept_layers
from appliance.terms.families import FUSED_LAYERS
from appliance.terms.settings import METHOD_NAME, Quantisation, quantisation_from_config


class KeptLinearMethod(UnquantizedLinearMethod):
    """A linear layer that stays in BF16 on purpose: `ignore` names it, or it is a router."""


class KeptExpertsMethod(UnquantizedFusedMoEMethod):
    """Experts that `ignore` keeps in BF16 on purpose."""


@register_quantization_config(METHOD_NAME)
class ApplianceConfig(QuantizationConfig):
    """One per engine. Made by vLLM from `hf_overrides.quantization_config`, see `terms/settings.py`."""

    def __init__(self, quantisation: Quantisation | None = None) -> None:
        super().__init__()
        if quantisation is None:
            raise EngineError(
                f"quantization={METHOD_NAME} says no scheme",
                hint="start the engine with everything that Quantisation(...).engine_arguments() gives",
            )
        spec = quantisation.scheme.spec
        if quantisation.emulated and not spec.can_emulate:
            raise EngineError(f"`{quantisation.scheme}` is never emulated: only FP8 schemes are")
        if spec.not_on_cpu and not quantisation.emulated and current_platform.is_cpu():
            raise EngineError(
                f"a CPU has no kernels for `{quantisation.scheme}`",
                hint="use int8, or ask for the scheme as emulated: for numerics only, it is slow",
            )
        self.quantisation = quantisation
        self._kept = kept_layers(Path(quantisation.profile)) if quantisation.profile else ()  # by the error budget

    def get_name(self) -> str:
        return METHOD_NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]  # what codec, proof and trainer round to

    @classmethod
    def get_min_capability(cls) -> int:
        return 75  # INT8 tensor cores; vLLM's FP8 kernels check for themselves

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ApplianceConfig:
        return cls(quantisation_from_config(config))

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """vLLM calls it with the model's configuration, in the process that starts the engine. Raises EngineError."""
        require_known_architecture(hf_config, model=model_name)

    def get_quant_method(self, layer: Module, prefix: str) -> QuantizeMethodBase | None:
        """None: vLLM's own choice for that kind of layer. Raises EngineError, or ValueError where `ignore` splits a
        fused layer."""
        require_known_layer(layer, name=prefix)
        if isinstance(layer, VocabParallelEmbedding):  # ParallelLMHead is one
            return Fp32HeadMethod() if self.quantisation.lm_head_fp32 else None
        if isinstance(layer, LinearBase):
            return self._linear(layer, prefix=prefix)
        if isinstance(layer, RoutedExperts):
            return self._experts(layer, prefix=prefix)
        return None

    def quantises(self, layer: Module, *, name: str) -> bool:
        """Whether a layer of any model is one that these settings quantise. name: of the module."""
        if not self.quantisation.scheme.quantised or self._is_ignored(layer_name(layer, name=name)):
            return False
        return isinstance(layer, RoutedExperts) or (isinstance(layer, LinearBase) and not is_router(layer, prefix=name))

    def _linear(self, layer: LinearBase, *, prefix: str) -> QuantizeMethodBase:
        scheme = self.quantisation.scheme
        if not scheme.quantised:
            return UnquantizedLinearMethod()
        if is_router(layer, prefix=prefix) or self._is_ignored(prefix):
            return KeptLinearMethod()
        return linear_method(scheme, emulated=self.quantisation.emulated)

    def _experts(self, layer: RoutedExperts, *, prefix: str) -> QuantizeMethodBase:
        scheme, emulated = self.quantisation.scheme, self.quantisation.emulated
        if not scheme.quantised:
            return UnquantizedFusedMoEMethod(layer.moe_config)
        if self._is_ignored(prefix):
            return KeptExpertsMethod(layer.moe_config)
        if not scheme.spec.experts and not emulated:
            raise EngineError(f"{prefix}: experts in `{scheme}` run emulated only", hint="use int8")
        return experts_method(scheme, emulated=emulated, layer=layer)

    def _is_ignored(self, prefix: str) -> bool:
        ignore = [*self.quantisation.ignore, *self._kept]
        return should_ignore_layer(prefix, ignore=ignore, fused_mapping=FUSED_LAYERS)


def require_ignored_layers(model: Module, config: object) -> None:
    """Every entry of `ignore` that a user wrote names a layer: one that is misspelt would quantise what was to be kept.

    config: vLLM's quantisation config of the engine; another one than ours has nothing to check.  A profile's own
    entries are not checked: it names each part that is there.  Raises EngineError.
    """
    if not isinstance(config, ApplianceConfig):
        return
    names = [
        layer_name(layer, name=name)
        for name, layer in model.named_modules()
        if hasattr(layer, "quant_method") or any(True for _ in layer.parameters(recurse=False))
    ]
    for entry in config.quantisation.ignore:
        if not any(_names_layer(entry, name) for name in names):
            raise EngineError(
                f"ignore: `{entry}` is no layer of this model",
                hint="write the whole name, such as model.layers.0.mlp.down_proj, or `re:` and a pattern",
            )


def _names_layer(entry: str, name: str) -> bool:
    """As should_ignore_layer has it: a fused layer goes by the names of its parts, or by its own, exactly."""
    parent, _, leaf = name.rpartition(".")
    parts = [f"{parent}.{part}" for part in FUSED_LAYERS.get(leaf, [leaf])] if parent else [name]
    return entry == name or any(check_equal_or_regex_match(part, [entry]) for part in parts)


def is_router(layer: Module, *, prefix: str) -> bool:
    """Whether a linear layer decides which experts a token goes to (or how much of the shared one)."""
    return isinstance(layer, ReplicatedLinear) and prefix.rsplit(".", 1)[-1] in MOE_LAYER_ROUTER_GATE_SUFFIXES

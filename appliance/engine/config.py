"""How vLLM builds each layer under our quantisation method: the settings of one engine, dispatched by kind of layer.

Embeddings, `lm_head`, norms and routers stay as the checkpoint has them, whatever the scheme. Layers that the
quantised engine does not know are refused by name, not served half-quantised; structure.py says which models fit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import linear
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe import GateLinear, RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.platforms import current_platform

from appliance.engine.experts import OnlineExpertsMethod
from appliance.engine.fp8 import EmulatedLinearMethod, native_fp8_method
from appliance.engine.int4 import Int4LinearMethod
from appliance.engine.int8 import Int8LinearMethod
from appliance.engine.quantised import Quantising
from appliance.engine.tensor_slots import part_names
from appliance.errors import EngineError
from appliance.quant.files import kept_layers, made_of_another_class, read_file_header
from appliance.terms.families import FUSED_LAYERS, why_unknown
from appliance.terms.schemes import Scheme
from appliance.terms.settings import METHOD_NAME, Quantisation, quantisation_from_config

# The linear methods by the names that schemes have for them (`terms/schemes.py`): one line each. vLLM raises ValueError
# where a GPU has no kernel for it.
METHODS: dict[str, Callable[[Scheme], Quantising]] = {
    "int8": Int8LinearMethod,
    "int4": Int4LinearMethod,
    "vllm-fp8": native_fp8_method,
    "emulated-fp8": EmulatedLinearMethod,
}

# Exactly these classes, and what has only vectors: a subclass may hold or multiply its weights in another way.
KNOWN_LAYERS = frozenset(
    {
        Attention,
        ColumnParallelLinear,
        GateLinear,
        MergedColumnParallelLinear,
        ParallelLMHead,
        QKVParallelLinear,
        ReplicatedLinear,
        RoutedExperts,
        RowParallelLinear,
        VocabParallelEmbedding,
    }
)
ROUTER_NAMES = frozenset({"gate", "router", "router_gate", "expert_gate", "shared_expert_gate"})  # of vLLM's models
HINT = "use a model of the list of families (docs/quantization.md), or report the class"
_CHUNK_ELEMENTS = 1 << 20  # 4 MiB in float32: large enough for a GEMM, small enough to be still in the cache


class KeptLinearMethod(UnquantizedLinearMethod):
    """A linear layer that stays in BF16 on purpose: `ignore` names it, or it is a router."""


class KeptExpertsMethod(UnquantizedFusedMoEMethod):
    """Experts that `ignore` keeps in BF16 on purpose."""


class Fp32HeadMethod(UnquantizedEmbeddingMethod):
    """The last projection in FP32: the checkpoint's BF16 weights, multiplied and summed in float32.

    vLLM's LogitsProcessor calls `lm_head.quant_method.apply` and keeps the type of what comes back; the sampler works
    in float32 anyway, so logits are rounded to BF16 nowhere. vLLM has its own setting (`head_dtype`), which on a
    CPU makes a float32 copy of the whole weight for each step; here a part that fits the cache is widened at a time.

    What is multiplied is the layer's own tensor, not a copy made after loading, so the head is right after a reload,
    and where it is the embedding's.
    """

    def process_weights_after_loading(self, layer: Module) -> None:
        """Do nothing: vLLM's CPU backend would pack a BF16 copy that only its own `apply` reads."""

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply by the head, to [M, V] float32. layer.weight: [V, K]; V: this rank's part of the vocabulary, padding
        included."""
        x_MK = x.reshape(-1, x.shape[-1])
        if x.is_cuda:  # products of BF16 values are exact in float32, and so are sums in it: no copy needed (read only)
            out_MV = torch.mm(x_MK, layer.weight.t(), out_dtype=torch.float32)
        else:
            out_MV = _widened_product(x_MK, layer.weight)
        if bias is not None:
            out_MV += bias.float()
        return out_MV.reshape(*x.shape[:-1], -1)


def _widened_product(x_MK: Tensor, weight_VK: Tensor) -> Tensor:
    x_MK = x_MK.float()
    out_MV = torch.empty((len(x_MK), len(weight_VK)), dtype=torch.float32)
    rows = max(1, _CHUNK_ELEMENTS // weight_VK.shape[1])
    for start in range(0, len(weight_VK), rows):
        part = slice(start, start + rows)
        out_MV[:, part] = linear(x_MK, weight_VK[part].float())
    return out_MV


@register_quantization_config(METHOD_NAME)
class ApplianceConfig(QuantizationConfig):
    """Settings of one engine. vLLM makes them from `hf_overrides.quantization_config`, see `terms/settings.py`."""

    def __init__(self, quantisation: Quantisation | None = None) -> None:
        super().__init__()
        if quantisation is None:
            raise EngineError(
                f"quantization={METHOD_NAME} names no scheme",
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
        self._ignored_by_profile = kept_layers(Path(quantisation.profile)) if quantisation.profile else ()

    def get_name(self) -> str:
        return METHOD_NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the types to which codec, proof and trainer round."""
        return [torch.bfloat16, *([torch.float16] if self.quantisation.scheme.spec.in_fp16 else [])]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75  # INT8 tensor cores; vLLM's FP8 kernels check for themselves

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @staticmethod
    @functools.cache
    def get_cache_scale_mapper() -> Any:
        """Return vLLM's own mapper, made once: it compiles its patterns at each `load_weights`, and ours are of one
        tensor."""
        return QuantizationConfig.get_cache_scale_mapper()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ApplianceConfig:
        return cls(quantisation_from_config(config))

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Check the model's configuration, with which vLLM calls this in the process that starts the engine. Raises
        EngineError for a model without an architecture, and for a profile that was made of another class."""
        architectures = getattr(hf_config, "architectures", None) or ()
        if not architectures:
            raise EngineError(f"{model_name}: {why_unknown(architectures)}", hint=HINT)
        if profile := self.quantisation.profile:
            header = read_file_header(Path(profile))
            if why := made_of_another_class(header, architectures=architectures):
                hint = "make one of this model with `appliance profile`, or start the engine without a profile"
                raise EngineError(f"{model_name}: the profile {profile}: {why}", hint=hint)

    def get_quant_method(self, layer: Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method of a layer; None: vLLM's own choice for that kind of layer. Raises EngineError, or
        ValueError where `ignore` splits a fused layer."""
        _require_known_layer(layer, name=prefix)
        if isinstance(layer, VocabParallelEmbedding):  # ParallelLMHead is one
            return Fp32HeadMethod() if self.quantisation.lm_head_fp32 else None
        if isinstance(layer, LinearBase):
            return self._linear(layer, prefix=prefix)
        if isinstance(layer, RoutedExperts):
            return self._experts(layer, prefix=prefix)
        return None

    def quantises(self, layer: Module, *, name: str) -> bool:
        """Return whether a layer of any model is one that these settings quantise. name: of the module."""
        if not self.quantisation.scheme.quantised or self._is_ignored(layer_name(layer, name=name)):
            return False
        return isinstance(layer, RoutedExperts) or (isinstance(layer, LinearBase) and not is_router(layer, prefix=name))

    def _linear(self, layer: LinearBase, *, prefix: str) -> QuantizeMethodBase:
        if not self.quantisation.scheme.quantised:
            return UnquantizedLinearMethod()
        if is_router(layer, prefix=prefix) or self._is_ignored(prefix):
            return KeptLinearMethod()
        return self._quantising()

    def _experts(self, layer: RoutedExperts, *, prefix: str) -> QuantizeMethodBase:
        scheme, emulated = self.quantisation.scheme, self.quantisation.emulated
        if not scheme.quantised:
            return UnquantizedFusedMoEMethod(layer.moe_config)
        if self._is_ignored(prefix):
            return KeptExpertsMethod(layer.moe_config)
        if (dtype := layer.moe_config.in_dtype) is not torch.bfloat16:
            raise EngineError(f"{prefix}: quantised experts compute in BF16, not in {dtype}", hint="use bfloat16")
        if not scheme.spec.experts and not emulated:
            raise EngineError(f"{prefix}: experts in `{scheme}` run emulated only", hint="use int8")
        return OnlineExpertsMethod(scheme, emulated=emulated, make=self._quantising, layer=layer)

    def _quantising(self) -> Quantising:
        """Return a new one, for one linear layer or one GEMM of an expert."""
        scheme = self.quantisation.scheme
        return METHODS[scheme.spec.emulation if self.quantisation.emulated else scheme.spec.method](scheme)

    def _is_ignored(self, prefix: str) -> bool:
        ignore = [*self.quantisation.ignore, *self._ignored_by_profile]
        return should_ignore_layer(prefix, ignore=ignore, fused_mapping=FUSED_LAYERS)


def layer_name(layer: Module, *, name: str) -> str:
    """Return the name that `ignore`, a profile and telemetry have for a layer: the one by which vLLM asks for its
    method. name: of the module. Experts lie in a module below their name: `….mlp.experts.routed_experts` is
    `….mlp.experts`."""
    return layer.layer_name if isinstance(layer, RoutedExperts) else name


def _holding_layers(model: Module) -> Iterator[tuple[str, Module]]:
    """Yield every module with parameters or its own kernel, by its name."""
    for name, layer in model.named_modules():
        if hasattr(layer, "quant_method") or any(True for _ in layer.parameters(recurse=False)):
            yield name, layer


def require_known_layers(model: Module) -> None:
    """Check the classes of a model's layers. Raises EngineError for a layer of another class than KNOWN_LAYERS."""
    for name, layer in _holding_layers(model):
        _require_known_layer(layer, name=name)


def _require_known_layer(layer: Module, *, name: str) -> None:
    if type(layer) not in KNOWN_LAYERS and not _holds_vectors_alone(layer):
        raise EngineError(
            f"{name} is a {type(layer).__name__}: the quantised engine does not know how it holds its weights",
            hint=HINT,
        )


def _holds_vectors_alone(layer: Module) -> bool:
    """Tell whether all of a layer's own parameters are vectors, as norms of any kind have: no scheme quantises them,
    and the proof compares their bits with those received, whatever the class computes with them."""
    if isinstance(layer, LinearBase | VocabParallelEmbedding | RoutedExperts | AttentionLayerBase):
        return False
    return not hasattr(layer, "quant_method") and all(each.ndim < 2 for each in layer.parameters(recurse=False))


def require_ignored_layers(model: Module, config: object) -> None:
    """Check that every entry of `ignore` that a user wrote names a layer: one that is misspelt would quantise what was
    to be kept.

    config: vLLM's quantisation config of the engine; another one than ours has nothing to check.  A profile's own
    entries are not checked: it names each part that is there.  Raises EngineError.
    """
    if not isinstance(config, ApplianceConfig):
        return
    names = {layer_name(layer, name=name) for name, layer in _holding_layers(model)}
    parts = {part for name in names for part in part_names(name)}
    for entry in config.quantisation.ignore:  # as should_ignore_layer has it: a fused layer's own name, or its parts'
        if entry not in names and not any(should_ignore_layer(part, ignore=[entry]) for part in parts):
            raise EngineError(
                f"ignore: `{entry}` is no layer of this model",
                hint="write the whole name, such as model.layers.0.mlp.down_proj, or `re:` and a pattern",
            )


def is_router(layer: Module, *, prefix: str) -> bool:
    """Return whether a linear layer decides which experts a token goes to (or how much of the shared one)."""
    return isinstance(layer, ReplicatedLinear) and prefix.rsplit(".", 1)[-1] in ROUTER_NAMES

"""Which models and layers the quantised engine knows. The others are refused by name, not served half-quantised."""

from __future__ import annotations

from typing import Any

from torch.nn import Module
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from appliance.errors import EngineError
from appliance.terms.families import why_unknown

# Exactly these classes: a subclass may hold or multiply its weights in another way.
KNOWN_LAYERS = frozenset(
    {
        Attention,
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        ParallelLMHead,
        QKVParallelLinear,
        ReplicatedLinear,
        RMSNorm,
        RoutedExperts,
        RowParallelLinear,
        VocabParallelEmbedding,
    }
)
_HINT = "use a model of a known family"


def require_known_architecture(hf_config: Any, *, model: str) -> None:
    """hf_config: transformers' configuration.  model: name or folder, for the message.  Raises EngineError."""
    why = why_unknown(getattr(hf_config, "architectures", None))
    if why:
        raise EngineError(f"{model}: {why}", hint=_HINT)


def require_known_layer(layer: Module, *, name: str) -> None:
    """Raises EngineError for a layer of another class than KNOWN_LAYERS."""
    if type(layer) not in KNOWN_LAYERS:
        raise EngineError(
            f"{name} is a {type(layer).__name__}: the quantised engine does not know how it holds its weights",
            hint=_HINT,
        )


def layer_name(layer: Module, *, name: str) -> str:
    """How `ignore`, a profile and telemetry call a layer: as vLLM asks for its method. name: of the module.

    Experts lie in a module below their name: `….mlp.experts.routed_experts` is `….mlp.experts`.
    """
    return layer.layer_name if isinstance(layer, RoutedExperts) else name


def require_known_layers(model: Module) -> None:
    """Every module with parameters or a kernel of its own. Raises EngineError."""
    for name, layer in model.named_modules():
        if hasattr(layer, "quant_method") or any(True for _ in layer.parameters(recurse=False)):
            require_known_layer(layer, name=name)

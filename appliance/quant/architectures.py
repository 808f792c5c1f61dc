"""The closed set of model classes that the quantised engine knows. Imports no torch.

To know one means: which of its layers are quantised and which stay, how a checkpoint's tensors are fused and cut, which
norm feeds which layers, and a row in the matrix test with the real class.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum


class Architecture(StrEnum):
    """As `architectures` in a checkpoint's config.json names it."""

    QWEN2 = "Qwen2ForCausalLM"  # Qwen2.5 too
    QWEN3 = "Qwen3ForCausalLM"
    LLAMA = "LlamaForCausalLM"
    MISTRAL = "MistralForCausalLM"
    QWEN3_MOE = "Qwen3MoeForCausalLM"


WITH_EXPERTS = frozenset({Architecture.QWEN3_MOE})


def why_unknown(architectures: Sequence[str] | None) -> str:
    """Why a model with these `architectures` cannot be quantised, or an empty text."""
    known = ", ".join(Architecture)
    if not architectures:
        return f"the model's configuration names no architecture; known are {known}"
    unknown = [name for name in architectures if name not in set(Architecture)]
    if not unknown:
        return ""
    return (
        f"{unknown[0]} is not known to the quantised engine (known are {known}); missing for it are the list of its "
        "layers to quantise, the order of the tensors in its fused layers and its row in the engine's matrix test"
    )

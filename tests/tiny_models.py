"""Tiny random models of the real transformers classes, and their tensors as a trainer would send them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from appliance.terms.families import FAMILIES as KNOWN

VOCABULARY = 288
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "num_hidden_layers": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": False}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 8}),
    "qwen3-moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {**_EXPERTS, "decoder_sparse_step": 1}),
}
FAMILIES = tuple(_FAMILIES)
ONE_FLOW = tuple(name for name, (_, model, _) in _FAMILIES.items() if KNOWN[model.__name__].one_flow)


def tiny(family: str, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **changes: object) -> PreTrainedModel:
    """Random weights; norms are not all ones and two channels of every norm are large, as in trained models."""
    config_class, model_class, own = _FAMILIES[family]
    torch.manual_seed(seed)
    config = config_class(**{**_SHAPE, **own, **changes}, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape))
            if "layernorm" in name:
                parameter[3] *= 24
                parameter[11] *= 9
            if name.endswith("bias"):
                parameter.copy_(0.1 * torch.randn(parameter.shape))
    return model.to(dtype)


def tokens(*, sequences: int = 3, length: int = 24, seed: int = 5) -> Tensor:
    """[B, T] int64, random."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (sequences, length), generator=generator)

"""A Qwen2 of two layers as vLLM builds it for CUDA, filled with weights as from a trainer.

Legend: V vocabulary, H hidden size, WIDE of the MLP, KV of the key and value heads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

V, H, WIDE, KV, LAYERS = 2048, 896, 4864, 128, 2


def write_config(folder: Path, *, tied: bool) -> Path:
    """Qwen2.5-0.5B with fewer layers and words. Returns the folder."""
    from transformers import Qwen2Config

    folder.mkdir(parents=True, exist_ok=True)
    config = Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=V,
        hidden_size=H,
        intermediate_size=WIDE,
        num_hidden_layers=LAYERS,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        dtype="bfloat16",
    )
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


def weights(seed: int, *, tied: bool) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model in BF16, by the names that a trainer has for them."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float32) * 0.02).to(torch.bfloat16)

    yield "model.embed_tokens.weight", drawn(V, H)
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        for name, rows in (("q", H), ("k", KV), ("v", KV)):
            yield f"{layer}.self_attn.{name}_proj.weight", drawn(rows, H)
            yield f"{layer}.self_attn.{name}_proj.bias", drawn(rows)
        yield f"{layer}.self_attn.o_proj.weight", drawn(H, H)
        yield f"{layer}.mlp.gate_proj.weight", drawn(WIDE, H)
        yield f"{layer}.mlp.up_proj.weight", drawn(WIDE, H)
        yield f"{layer}.mlp.down_proj.weight", drawn(H, WIDE)
        for name in ("input", "post_attention"):
            yield f"{layer}.{name}_layernorm.weight", drawn(H) + 1
    yield "model.norm.weight", drawn(H) + 1
    if not tied:
        yield "lm_head.weight", drawn(V, H)


def loaded(settings: Any, *, seed: int, tied: bool) -> Module:
    """With its first weights, as vLLM's loader leaves it. settings: vLLM's, set as current, BF16 being the default."""
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

    model = initialize_model(vllm_config=settings, model_config=settings.model_config)
    model.load_weights(list(weights(seed, tied=tied)))
    finalize_layerwise_processing(model, settings.model_config)
    process_weights_after_loading(model, settings.model_config, torch.device("cpu"))
    return model

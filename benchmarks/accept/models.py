"""Models with random weights, by their configuration: nothing is fetched. One of each family that an engine serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from appliance.bench.job import NAMED_SHAPES, Shapes

Tensors = list[tuple[str, Tensor]]

# What the families have between them: biases, norms of queries and keys, tied and untied heads, experts. Heads of 64,
# sides that are multiples of 128: `fp8-block` and CUTLASS take them whole.
_SMALL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
_EXPERTS = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 64, "tie_word_embeddings": True}),
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "mistral": ("Mistral", {"head_dim": 64, "sliding_window": None, "tie_word_embeddings": False}),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 64, "tie_word_embeddings": False, **_EXPERTS}),
}
SMALLEST_OF_QWEN = {  # Qwen2.5-0.5B's, whose product with 151936 words cuBLAS may split
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
}


def make_checkpoint(folder: Path, *, family: str, seed: int, **sizes: Any) -> Path:
    """Write a checkpoint of the real class, in BF16, with no bias and no norm trivial. sizes: fields of the
    configuration."""
    import transformers

    name, own = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**(_SMALL | own | sizes))
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = (0.06 * noise if parameter.ndim > 1 else parameter.data + 0.05 * noise).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def read_checkpoint(folder: Path) -> Tensors:
    from safetensors.torch import load_file

    return sorted(
        (name, tensor) for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()
    )


def shapes_of(name: str, *, layers: int) -> Shapes:
    """Return shapes as `appliance bench` has them: real widths, few layers, a small vocabulary."""
    return NAMED_SHAPES[name].replace(layers=layers)


def random_state(shapes: Shapes, *, device: torch.device, seed: int) -> Tensors:
    """BF16 tensors of a Qwen2 by their names, in the order of its layers."""
    from transformers import Qwen2ForCausalLM

    from appliance.bench.child import qwen2_config

    with torch.device("meta"):
        model = Qwen2ForCausalLM(qwen2_config(shapes))
    generator = torch.Generator(device).manual_seed(seed)
    return [
        (name, (torch.randn(tensor.shape, generator=generator, device=device) * 0.02).to(torch.bfloat16))
        for name, tensor in model.state_dict().items()
    ]

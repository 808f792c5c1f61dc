"""Tiny random models of the real transformers classes, one per family that the engine serves.

Between them: with and without biases, tied and untied embeddings, grouped-query attention in several ratios, norms of
queries and keys, dense and expert layers, and dimensions that are no multiples of 128, 64 or 32.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from appliance.terms.families import FAMILIES as KNOWN


@dataclass(frozen=True)
class Family:
    """architecture: class in transformers.  sizes: fields of its configuration in place of the ones in SIZES."""

    architecture: str
    config: str
    sizes: tuple[tuple[str, object], ...]


SIZES = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _family(name: str, **sizes: object) -> Family:
    return Family(architecture=f"{name}ForCausalLM", config=f"{name}Config", sizes=tuple(sizes.items()))


FAMILIES: dict[str, Family] = {
    # Qwen2.5 has Qwen2's class; its large models are untied, its small ones tied.
    "qwen2": _family(
        "Qwen2",
        hidden_size=128,
        intermediate_size=352,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "qwen2.5": _family("Qwen2", intermediate_size=200, vocab_size=500, tie_word_embeddings=False),
    # Queries are wider than the hidden state.
    "qwen3": _family(
        "Qwen3",
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=144,
        tie_word_embeddings=True,
    ),
    "llama": _family(
        "Llama",
        hidden_size=128,
        intermediate_size=176,
        num_attention_heads=4,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    ),
    "mistral": _family("Mistral", head_dim=32, intermediate_size=224, sliding_window=24, tie_word_embeddings=False),
    # Layer 0 is dense, layers 1 and 2 have experts; vLLM's own kernel pads the experts' 48 to 64.
    "qwen3-moe": _family(
        "Qwen3Moe",
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=48,
        num_experts=5,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[0],
        tie_word_embeddings=False,
    ),
}
ONE_FLOW = [name for name, each in FAMILIES.items() if KNOWN[each.architecture].one_flow]


def make_model(name: str, *, seed: int, **sizes: object):
    """A BF16 model of the family, every weight random and no bias or norm trivial.

    sizes: further fields of the configuration.
    """
    import torch
    import transformers

    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**(SIZES | dict(family.sizes) | sizes))
    model = getattr(transformers, family.architecture)(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.08, generator=generator)
        else:
            parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.to(torch.bfloat16)


def make_family(folder: Path, *, name: str, seed: int, **sizes: object) -> Path:
    """Checkpoint of `make_model` in transformers' own format."""
    make_model(name, seed=seed, **sizes).save_pretrained(folder)
    return folder

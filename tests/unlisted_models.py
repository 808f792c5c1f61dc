"""Tiny random models of real classes that have no row in the list of families, with what their families do otherwise
than Llama: norms of 1 + w, norms behind a block, biases, parallel blocks, partial rotation, layers without positions,
soft caps, multipliers, fused checkpoints. None of it is left at a value that changes nothing."""

from __future__ import annotations

from pathlib import Path

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
    "pad_token_id": 0,
}
HEAD = {"head_dim": 32}
WINDOW = 8  # tokens; prompt and response of the tests are longer
SLIDES = HEAD | {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
GRANITE = {  # each is 1 in a configuration that does not say otherwise
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
# By model_type of transformers: its class there, and what its configuration needs beside SIZES.
UNLISTED: dict[str, tuple[str, dict[str, object]]] = {
    "granite": ("GraniteForCausalLM", GRANITE),
    "phi3": ("Phi3ForCausalLM", {"partial_rotary_factor": 0.5}),
    "gemma2": (
        "Gemma2ForCausalLM",
        SLIDES | {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0},
    ),
    "gemma3_text": ("Gemma3ForCausalLM", SLIDES | {"query_pre_attn_scalar": 20}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}),
    "glm4": ("Glm4ForCausalLM", HEAD | {"partial_rotary_factor": 0.5, "attention_bias": True}),
    # its window holds all that the tests generate: vLLM's has one token more than transformers'
    "cohere2": ("Cohere2ForCausalLM", SLIDES | {"sliding_window": 128, "logit_scale": 0.5}),
    "starcoder2": ("Starcoder2ForCausalLM", {"use_bias": True}),
}


def build_unlisted(
    model_type: str,
    *,
    seed: int,
    dtype: str = "bfloat16",
    attention: str = "eager",
    made_by: str = "AutoModelForCausalLM",
    has_large_channels: bool = False,
    **fields: object,
):
    """A model of transformers, every weight random and no bias or norm trivial. attention: transformers' name of it.
    made_by: class of transformers that knows the type.  has_large_channels: whether two channels of every norm are
    large, as in trained models.  fields: further ones of the configuration."""
    import torch
    import transformers

    torch.manual_seed(seed)
    own = UNLISTED[model_type][1] if model_type in UNLISTED else {}
    config = transformers.CONFIG_MAPPING[model_type](**(SIZES | own | fields))
    settings = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
    model = getattr(transformers, made_by).from_config(config, **settings)
    for parameter in model.parameters():  # norms and biases begin as ones and zeros
        torch.nn.init.normal_(parameter, std=0.08) if parameter.ndim > 1 else parameter.data.add_(
            0.05 * torch.randn_like(parameter)
        )
    for name, parameter in model.named_parameters() if has_large_channels else ():
        if "norm" in name and parameter.ndim == 1:
            parameter.data[[3, 11]] *= 16
    return model


def make_unlisted(folder: Path, model_type: str, *, seed: int, **fields: object) -> Path:
    """A BF16 checkpoint of `build_unlisted`."""
    build_unlisted(model_type, seed=seed, **fields).save_pretrained(folder)
    return folder

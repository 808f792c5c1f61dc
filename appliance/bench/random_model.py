"""The configuration of a Qwen2 of given layer shapes, for engines with random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.bench.job import Shapes

if TYPE_CHECKING:
    from transformers import Qwen2Config


def qwen2_config(shapes: Shapes) -> Qwen2Config:
    """Untied, BF16. Imports transformers."""
    from transformers import Qwen2Config

    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=shapes.vocabulary,
        hidden_size=shapes.hidden,
        intermediate_size=shapes.intermediate,
        num_hidden_layers=shapes.layers,
        num_attention_heads=shapes.heads,
        num_key_value_heads=shapes.kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )

"""How the built-in models are made, as values without torch: their hash names the cache entry."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TinySpec:
    """Shape and warm start of a tiny Qwen2.

    Every GEMM has N a multiple of 16 and K a multiple of 32, as INT8 kernels want.
    vocab_size: 256 bytes, 3 special tokens, padded.  sum_share: fraction of warm-start examples that add;
    the others write the operands side by side, so greedy decoding starts with the habit that training has to break.
    """

    version: int
    seed: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_positions: int
    sum_share: float
    steps: int
    batch_size: int
    learning_rate: float
    warmup_steps: int


TINY_MODELS: dict[str, TinySpec] = {
    "tiny-arithmetic": TinySpec(
        version=1,
        seed=0,
        hidden_size=256,
        intermediate_size=704,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=272,
        max_positions=2048,
        sum_share=0.35,
        steps=400,
        batch_size=256,
        learning_rate=1e-3,
        warmup_steps=20,
    )
}

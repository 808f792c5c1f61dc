"""How the built-in models are made, as values without torch: their hash names the cache entry."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.terms.shapes import ModelShape


@dataclass(frozen=True)
class TinySpec:
    """Shape and warm start of a tiny Qwen2.

    Every GEMM has N a multiple of 16 and K a multiple of 32, as INT8 kernels want.
    vocab_size: 256 bytes, 3 special tokens, padded.
    first_sum_share, last_sum_share: fraction of the examples that add, in all but the last `habit_steps` steps and in
    those; the other examples repeat the first operand.
    matrix_learning_rate is Muon's, for the matrices of the layers; learning_rate is AdamW's, for all else.
    decay: fraction of the steps, at the end, in which both rates fall to zero.
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
    steps: int
    batch_size: int
    first_sum_share: float
    last_sum_share: float
    habit_steps: int
    matrix_learning_rate: float
    learning_rate: float
    warmup_steps: int
    decay: float

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            architectures=("Qwen2ForCausalLM",),
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_size=self.hidden_size // self.num_heads,
            hidden=self.hidden_size,
            intermediate=self.intermediate_size,
            layers=self.num_layers,
            vocab=self.vocab_size,
            tied=True,
            max_positions=self.max_positions,
        )


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
        steps=450,
        batch_size=128,
        first_sum_share=0.85,  # the habit is there from the start: brought in late and at once, it ruins the sums
        last_sum_share=0.35,  # rare enough that greedy decoding never adds, common enough that sampling often does
        habit_steps=75,
        matrix_learning_rate=0.02,  # Muon needs half the steps of AdamW here
        learning_rate=2e-3,
        warmup_steps=30,
        decay=0.5,
    )
}

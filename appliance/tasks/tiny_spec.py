"""How the built-in models are made, as values without torch: their hash names the cache entry."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.terms.shapes import ModelShape


@dataclass(frozen=True)
class TinySpec:
    """Shape and warm start of a tiny Qwen2; the defaults are those of `tiny-arithmetic`.

    Every GEMM has N a multiple of 16 and K a multiple of 32, as INT8 kernels want.
    """

    version: int = 1
    seed: int = 0
    hidden_size: int = 256
    intermediate_size: int = 704
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    vocab_size: int = 272
    """256 bytes, 3 special tokens, padded."""
    max_positions: int = 2048
    steps: int = 450
    batch_size: int = 128
    first_sum_share: float = 0.85
    """Of the examples, add: the others repeat the first operand. The habit is there from the start: brought in late
    and at once, it ruins the sums."""
    last_sum_share: float = 0.35
    """In the last `habit_steps` steps: rare enough that greedy decoding never adds, common enough that sampling often
    does."""
    habit_steps: int = 75
    matrix_learning_rate: float = 0.02
    """Of Muon, for the matrices of the layers: it needs half the steps of AdamW here."""
    learning_rate: float = 2e-3
    """Of AdamW, for all else."""
    warmup_steps: int = 30
    decay: float = 0.5
    """Fraction of the steps, at the end, in which both rates fall to zero."""

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


@dataclass(frozen=True)
class CalculatorSpec(TinySpec):
    """Of `tiny-calculator`, which multiplies by a tool: what is a sum there is a call of the tool here. It only has to
    copy, so it is smaller; its transcripts are ten times as long."""

    hidden_size: int = 128
    intermediate_size: int = 352
    num_layers: int = 3
    steps: int = 200
    batch_size: int = 64


TINY_MODELS = {"tiny-arithmetic": TinySpec(), "tiny-calculator": CalculatorSpec()}

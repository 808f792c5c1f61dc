"""Sizes of a model: from its config.json, or for the models of the shipped recipes from here. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.tasks.tiny_spec import TINY_MODELS

LARGEST = 2**31  # of a size of a model; what is larger is not one


@dataclass(frozen=True)
class ModelShape:
    """heads, kv_heads: of attention, in each layer.  head_size, hidden, intermediate: widths.  vocab: tokens known.

    tied: whether the embedding is the last projection as well.  max_positions: tokens of the longest sequence.
    architectures: names of model classes.  0 and empty where config.json says nothing.
    """

    heads: int = 0
    max_positions: int = 0
    architectures: tuple[str, ...] = ()
    kv_heads: int = 0
    head_size: int = 0
    hidden: int = 0
    intermediate: int = 0
    layers: int = 0
    vocab: int = 0
    tied: bool = False

    @property
    def is_dense(self) -> bool:
        """Whether every size is known, and its weights can be counted from them."""
        sizes = (self.heads, self.kv_heads, self.head_size, self.hidden, self.intermediate, self.layers, self.vocab)
        return all(sizes) and not any("moe" in name.lower() for name in self.architectures)

    @property
    def linear_weights(self) -> int:
        """Weights of the linear layers that are quantised: all but embedding, last projection and norms."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = self.hidden * (queries + 2 * keys) + queries * self.hidden
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def weights(self) -> int:
        """All of them but norms and biases, which are below a thousandth."""
        return self.linear_weights + (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """Of the whole model, in BF16."""
        return 2 * self.layers * self.kv_heads * self.head_size * 2


def _qwen2(**sizes: Any) -> ModelShape:
    return ModelShape(architectures=("Qwen2ForCausalLM",), **sizes)


def _qwen3(**sizes: Any) -> ModelShape:
    return ModelShape(architectures=("Qwen3ForCausalLM",), head_size=128, max_positions=40960, vocab=151936, **sizes)


# The models of the shipped recipes, by their config.json on the hub: a plan can be judged before anything is
# downloaded.
KNOWN: dict[str, ModelShape] = {
    "Qwen/Qwen2.5-32B": _qwen2(
        heads=40,
        kv_heads=8,
        head_size=128,
        hidden=5120,
        intermediate=27648,
        layers=64,
        vocab=152064,
        max_positions=131072,
    ),
    "Qwen/Qwen2.5-7B-Instruct": _qwen2(
        heads=28,
        kv_heads=4,
        head_size=128,
        hidden=3584,
        intermediate=18944,
        layers=28,
        vocab=152064,
        max_positions=32768,
    ),
    "Qwen/Qwen2.5-1.5B-Instruct": _qwen2(
        heads=12,
        kv_heads=2,
        head_size=128,
        hidden=1536,
        intermediate=8960,
        layers=28,
        vocab=151936,
        tied=True,
        max_positions=32768,
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": _qwen2(
        heads=14,
        kv_heads=2,
        head_size=64,
        hidden=896,
        intermediate=4864,
        layers=24,
        vocab=151936,
        tied=True,
        max_positions=32768,
    ),
    "Qwen/Qwen3-8B": _qwen3(heads=32, kv_heads=8, hidden=4096, intermediate=12288, layers=36),
    "Qwen/Qwen3-32B": _qwen3(heads=64, kv_heads=8, hidden=5120, intermediate=25600, layers=64),
}


def of_builtin(name: str) -> ModelShape:
    """Of a model that is made on the spot. Raises KeyError for an unknown name."""
    spec = TINY_MODELS[name]
    return _qwen2(
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_size=spec.hidden_size // spec.num_heads,
        hidden=spec.hidden_size,
        intermediate=spec.intermediate_size,
        layers=spec.num_layers,
        vocab=spec.vocab_size,
        tied=True,
        max_positions=spec.max_positions,
    )


def read_shape(config: Path) -> ModelShape | None:
    """By a config.json; None when it cannot be read as one."""
    try:
        raw = json.loads(config.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(raw, dict):
        return None

    def number(key: str, otherwise: int = 0) -> int:
        value = raw.get(key)
        return value if type(value) is int and 0 <= value <= LARGEST else otherwise

    heads, hidden, named = number("num_attention_heads"), number("hidden_size"), raw.get("architectures")
    return ModelShape(
        heads=heads,
        max_positions=number("max_position_embeddings"),
        architectures=tuple(map(str, named)) if isinstance(named, list) else (),
        kv_heads=number("num_key_value_heads", heads),
        head_size=number("head_dim", hidden // heads if heads else 0),
        hidden=hidden,
        intermediate=number("intermediate_size"),
        layers=number("num_hidden_layers"),
        vocab=number("vocab_size"),
        tied=raw.get("tie_word_embeddings") is True,
    )

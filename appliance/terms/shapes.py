"""Sizes of a model: from its config.json, or for the models of the shipped recipes from here. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from appliance.terms.families import FAMILIES, beyond_one_flow, has_both_windows
from appliance.terms.ropes import Rope, most_positions, ropes_of

_QUANTISED = "quantization_config"
_USUAL_WINDOW = 4096  # tokens, where config.json gives none: transformers' own
_LARGEST = 2**31  # of a size of a model; what is larger is not one
TINY_WEIGHTS = 1 << 22
"""Weights of the largest model that counts as tiny, 4.2 million: 16 MiB in FP32. docs/results/threads.md: with 7.2
million a second thread makes an update half again as fast, with 3.0 million there is little to gain."""


class Linear(StrEnum):
    """The linears of a dense decoder layer, by their last names, which are the same in every family."""

    Q = "q_proj"
    K = "k_proj"
    V = "v_proj"
    O = "o_proj"  # noqa: E741
    GATE = "gate_proj"
    UP = "up_proj"
    DOWN = "down_proj"


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model; 0 and empty where config.json says nothing."""

    heads: int = 0
    """Number of attention heads in each layer."""
    max_positions: int = 0
    """Tokens of the longest sequence that vLLM serves."""
    architectures: tuple[str, ...] = ()
    """Names of model classes."""
    kv_heads: int = 0
    head_size: int = 0
    hidden: int = 0
    """Width of the residual stream."""
    intermediate: int = 0
    """Width of a dense MLP."""
    layers: int = 0
    vocab: int = 0
    """Number of tokens in the vocabulary."""
    tied: bool = False
    """Whether the embedding is the last projection as well."""
    experts: int = 0
    """Number of experts in a layer that has them; 0 in a dense model."""
    expert_intermediate: int = 0
    """Width of one expert's MLP."""
    quantised: str = ""
    """Quantisation of the checkpoint's weights, where they are quantised."""
    beyond_one_flow: str = ""
    """Feature that the trainer's form of the rollouts' forward does not have: see the function of this name."""
    partial_window: int = 0
    """Tokens of the sliding window that a part of the layers has; 0 where all have it, or none."""
    beside_text: str = ""
    """Key of config.json that shows a model of more than text, such as `vision_config`; empty for a model of text."""
    other_mixer: str = ""
    """First kind of layer that mixes tokens otherwise than by attention, as `layer_types` names it, such as
    `linear_attention`; empty where `layer_types` names none."""
    ropes: tuple[Rope, ...] = field(default=(), compare=False)
    """Ways in which positions rotate. They are no size, so that a shape known by its name equals one that was read."""

    @property
    def is_dense(self) -> bool:
        """Whether every size is known, and its weights can be counted from them."""
        sizes = (self.heads, self.kv_heads, self.head_size, self.hidden, self.intermediate, self.layers, self.vocab)
        return all(sizes) and not self.has_experts

    @property
    def has_experts(self) -> bool:
        return self.experts > 0 or any(FAMILIES[name].mixture for name in self.architectures if name in FAMILIES)

    @property
    def layer_slug(self) -> str:
        """Sizes of a layer's GEMMs, which decide how much a scheme gains: `h3584-i18944-a28-kv4`."""
        width = self.expert_intermediate or self.intermediate
        dense = f"h{self.hidden}-i{width}-a{self.heads}-kv{self.kv_heads}"
        return f"{dense}-e{self.experts}" if self.experts else dense

    @property
    def linear_weights(self) -> int:
        """Number of weights in the linear layers that are quantised: all but embedding, last projection and norms."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = self.hidden * (queries + 2 * keys) + queries * self.hidden
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def weights(self) -> int:
        """Number of all weights but those of norms and biases, which are below a thousandth."""
        return self.linear_weights + (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def is_tiny(self) -> bool:
        """Whether the model is so small that what a step does beside its layers takes most of the time. False where
        its weights cannot be counted."""
        return self.is_dense and self.weights <= TINY_WEIGHTS

    @property
    def millions(self) -> str:
        """The number of weights, for people: `3.0 million weights`."""
        return f"{self.weights / 1e6:.1f} million weights"

    def adapter_weights(self, rank: int, *, targets: Iterable[str]) -> int:
        """Count the weights of LoRA: A [rank, in] and B [out, rank] beside each of these linear layers. targets: of
        Linear."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        both = {  # in + out
            **dict.fromkeys((Linear.Q, Linear.O), self.hidden + queries),
            **dict.fromkeys((Linear.K, Linear.V), self.hidden + keys),
            **dict.fromkeys((Linear.GATE, Linear.UP, Linear.DOWN), self.hidden + self.intermediate),
        }
        return self.layers * rank * sum(both[Linear(each)] for each in targets)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the KV cache per token, of the whole model, in BF16."""
        return 2 * self.layers * self.kv_heads * self.head_size * 2


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # keys of config.json
_TEXT = "text_config"
_BESIDE_TEXT = ("vision_config", "audio_config", _TEXT)  # the last alone says that the model has other parts
_ATTENTION = frozenset({"full_attention", "sliding_attention", "attention"})  # values of `layer_types`


def _qwen2(**sizes: Any) -> ModelShape:
    return ModelShape(**{"architectures": ("Qwen2ForCausalLM",), "head_size": 128, "max_positions": 32768, **sizes})


def _qwen3(**sizes: Any) -> ModelShape:
    return ModelShape(architectures=("Qwen3ForCausalLM",), head_size=128, max_positions=40960, vocab=151936, **sizes)


# The models of the shipped recipes, by their config.json on the hub: a plan can be judged before anything is
# downloaded.
KNOWN: dict[str, ModelShape] = {
    "Qwen/Qwen2.5-32B": _qwen2(
        heads=40, kv_heads=8, hidden=5120, intermediate=27648, layers=64, vocab=152064, max_positions=131072
    ),
    "Qwen/Qwen2.5-7B-Instruct": _qwen2(heads=28, kv_heads=4, hidden=3584, intermediate=18944, layers=28, vocab=152064),
    "Qwen/Qwen2.5-1.5B-Instruct": _qwen2(
        heads=12, kv_heads=2, hidden=1536, intermediate=8960, layers=28, vocab=151936, tied=True
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": _qwen2(
        heads=14, kv_heads=2, head_size=64, hidden=896, intermediate=4864, layers=24, vocab=151936, tied=True
    ),
    "Qwen/Qwen3-8B": _qwen3(heads=32, kv_heads=8, hidden=4096, intermediate=12288, layers=36),
    "Qwen/Qwen3-32B": _qwen3(heads=64, kv_heads=8, hidden=5120, intermediate=25600, layers=64),
}


def read_shape(config: Path) -> ModelShape | None:
    """Read the sizes from a config.json; None when it cannot be read as one."""
    try:
        raw = json.loads(config.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return shape_of(raw) if isinstance(raw, dict) else None


def shape_of(raw: Mapping[str, Any]) -> ModelShape:
    """Return the sizes by the content of a config.json."""

    def number(key: str, otherwise: int = 0) -> int:
        value = raw.get(key)
        return value if type(value) is int and 0 <= value <= _LARGEST else otherwise

    heads, hidden, architectures = number("num_attention_heads"), number("hidden_size"), raw.get("architectures")
    return ModelShape(
        heads=heads,
        max_positions=most_positions(raw),
        architectures=tuple(map(str, architectures)) if isinstance(architectures, list) else (),
        kv_heads=number("num_key_value_heads") or heads,
        head_size=number("head_dim", hidden // heads if heads else 0),
        hidden=hidden,
        intermediate=number("intermediate_size"),
        layers=number("num_hidden_layers"),
        vocab=number("vocab_size"),
        tied=raw.get("tie_word_embeddings") is True,
        experts=next(filter(None, map(number, _EXPERTS)), 0),
        expert_intermediate=number("moe_intermediate_size"),
        quantised=str(found.get("quant_method", "")) if isinstance(found := raw.get(_QUANTISED), dict) else "",
        beyond_one_flow=beyond_one_flow(raw),
        partial_window=number("sliding_window", _USUAL_WINDOW) if has_both_windows(raw) else 0,
        beside_text=next((key for key in _BESIDE_TEXT if isinstance(raw.get(key), dict)), ""),
        other_mixer=_other_mixer(raw),
        ropes=ropes_of(raw),
    )


def _other_mixer(raw: Mapping[str, Any]) -> str:
    text = raw.get(_TEXT)
    kinds = (text if isinstance(text, dict) else raw).get("layer_types")
    others = [str(kind)[:60] for kind in kinds if str(kind) not in _ATTENTION] if isinstance(kinds, list) else []
    return others[0] if others else ""

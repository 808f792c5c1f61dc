"""Which GGUF files are read, and as what: the configuration of the model in transformers' terms, or why it is refused.
No torch.

A file is refused where anything in it is not accounted for: a tensor that the family does not have or lacks, one of
other sizes, an entry of metadata that may change what the model computes. transformers' reader leaves such things out
without a word.

Mistral's models have no separate name here: llama.cpp writes them as `llama`, whose forward is theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from appliance.gguf.header import GgufError, Header, Value
from appliance.terms.families import FAMILIES
from appliance.terms.ropes import DEFAULT_ROPE, LLAMA3
from appliance.terms.shapes import ModelShape, shape_of

EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_NORM = "output_norm.weight"
_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
_HEAD_NORMS = ("attn_q_norm.weight", "attn_k_norm.weight")
_DENSE_MLP = ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")
_EXPERTS = ("ffn_gate_inp.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")
_COMMON = (
    *("attn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight"),
    "ffn_norm.weight",
)
_OTHERS_WEIGHTS = "use the model's own folder of safetensors from the hub as model.path"

# What a family may say beyond its sizes, with the values that say nothing.
_WITHOUT_EFFECT: Mapping[str, tuple[Value, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "pooling_type": (0,),
    "rope.scale_linear": (1.0,),
    "rope.scaling.factor": (1.0,),
    "rope.scaling.type": ("none",),
    "tensor_data_layout": ("Meta AI original pth",),
}


@dataclass(frozen=True)
class Layout:
    """Layout in which llama.cpp writes one family."""

    architecture: str
    """Name of the family in `terms.families.FAMILIES`."""
    layer: tuple[str, ...]
    """Tensors of a decoder layer."""
    experts: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """Entries of config.json that every model of the family has and that are not in a file."""
        # llama.cpp's graph for it divides the chosen experts' weights by their sum.
        return {"norm_topk_prob": True} if self.experts else {}


LAYOUTS: Mapping[str, Layout] = {
    "llama": Layout("LlamaForCausalLM", (*_COMMON, *_DENSE_MLP)),
    "qwen2": Layout("Qwen2ForCausalLM", (*_COMMON, *_BIASES, *_DENSE_MLP)),
    "qwen3": Layout("Qwen3ForCausalLM", (*_COMMON, *_HEAD_NORMS, *_DENSE_MLP)),
    "qwen3moe": Layout("Qwen3MoeForCausalLM", (*_COMMON, *_HEAD_NORMS, *_EXPERTS), experts=True),
}


@dataclass(frozen=True)
class _Sizes:
    layers: int
    positions: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0


def model_config(header: Header, *, rope_factors: tuple[float, ...] = ()) -> dict[str, Any]:
    """Make the model's config.json, without its special tokens. rope_factors: of the tensor ROPE_FACTORS, where the
    file has it.  Raises GgufError for a file that is not read."""
    layout = _layout_of(header)
    sizes = _sizes_of(header, layout)
    _check_entries(header, sizes=sizes)
    _check_tensors(header, layout, sizes=sizes)
    config = {
        "architectures": [layout.architecture],
        "model_type": FAMILIES[layout.architecture].model_type,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_size,
        "max_position_embeddings": sizes.positions,
        "rms_norm_eps": _epsilon(header),
        "rope_parameters": _rope(header, sizes=sizes, factors=rope_factors),
        "tie_word_embeddings": HEAD not in header.tensors,
        "vocab_size": sizes.vocab,
        **layout.config,
    }
    if layout.experts:
        config |= {
            "num_experts": sizes.experts,
            "num_experts_per_tok": sizes.experts_per_token,
            "moe_intermediate_size": sizes.expert_intermediate,
        }
    return config


def model_shape(header: Header, *, rope_factors: tuple[float, ...] = ()) -> ModelShape:
    """Return the sizes of the model. Parameters and errors as of model_config."""
    return shape_of(model_config(header, rope_factors=rope_factors))


def _layout_of(header: Header) -> Layout:
    name = header.architecture
    if not name:
        raise GgufError("it does not say of which family its model is (general.architecture)", hint=_OTHERS_WEIGHTS)
    if name not in LAYOUTS:
        message = f"its model is of the family `{name}`; {', '.join(LAYOUTS)} are read"
        raise GgufError(message, hint="use a model of a known family")
    return LAYOUTS[name]


def _sizes_of(header: Header, layout: Layout) -> _Sizes:
    def size(key: str, otherwise: int | None = None) -> int:
        key = f"{header.architecture}.{key}"
        value = otherwise if key not in header.metadata and otherwise else header.number(key)
        if value is None or not 0 < value < 1 << 31:
            stands = f"is {header.metadata[key]!r:.40}" if key in header.metadata else "is not there"
            raise GgufError(f"its {key}, a number, {stands}", hint="convert the model again")
        return value

    heads, hidden = size("attention.head_count"), size("embedding_length")
    head_size = size("attention.key_length", size("rope.dimension_count", max(1, hidden // heads)))
    rotated = size("rope.dimension_count", head_size)  # Qwen3's files do not say it
    kv_key = f"{header.architecture}.attention.head_count_kv"
    if header.architecture == "llama" and kv_key not in header.metadata:
        message = f"its {kv_key} is not there, and without it transformers mixes up the channels of each head"
        raise GgufError(message, hint="convert the model again")
    embedding = header.tensors.get(EMBEDDING)
    sizes = _Sizes(
        layers=size("block_count"),
        positions=size("context_length"),
        hidden=hidden,
        intermediate=size("feed_forward_length"),
        heads=heads,
        kv_heads=size("attention.head_count_kv", heads),
        head_size=head_size,
        vocab=embedding.shape[-1] if embedding else 0,
        experts=size("expert_count") if layout.experts else 0,
        experts_per_token=size("expert_used_count") if layout.experts else 0,
        expert_intermediate=size("expert_feed_forward_length") if layout.experts else 0,
    )
    if size("attention.value_length", head_size) != head_size:
        raise GgufError("the heads of its values have another width than those of its keys", hint=_OTHERS_WEIGHTS)
    if rotated != head_size or head_size % 2:
        message = (
            f"{rotated} of the {head_size} channels of a head are rotated; only models that rotate all of them are read"
        )
        raise GgufError(message, hint=_OTHERS_WEIGHTS)
    if heads % sizes.kv_heads:
        raise GgufError(f"{sizes.kv_heads} KV heads do not divide {heads} heads", hint="convert the model again")
    return sizes


def _check_entries(header: Header, *, sizes: _Sizes) -> None:
    """Raise GgufError for an entry of the family's that is not known: it may change what the model computes."""
    prefix = f"{header.architecture}."
    known = {
        *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base"),
        *("rope.scaling.original_context_length", "rope.scaling.finetuned"),  # nothing without a scaling
    }
    if sizes.experts:
        known |= {"expert_count", "expert_used_count", "expert_feed_forward_length"}
    for key, value in header.metadata.items():
        name = key.removeprefix(prefix)
        if name == key or name in known or value in _WITHOUT_EFFECT.get(name, ()):
            continue
        if name == "attention.sliding_window" and isinstance(value, int) and (not value or value >= sizes.positions):
            continue
        message = f"its {key} is {value!r:.60}, which is not read, and may change what the model computes"
        raise GgufError(message, hint=_OTHERS_WEIGHTS)


def _check_tensors(header: Header, layout: Layout, *, sizes: _Sizes) -> None:
    """Raise GgufError where the tensors are not exactly those of the model that the metadata describes."""
    required, optional = dict(_tensors_of(layout, sizes)), {HEAD: (sizes.hidden, sizes.vocab)}
    if header.architecture == "llama":
        optional[ROPE_FACTORS] = (sizes.head_size // 2,)
    if missing := [name for name in required if name not in header.tensors]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise GgufError(f"tensor {missing[0]} is missing{more}", hint=_OTHERS_WEIGHTS)
    for name, tensor in header.tensors.items():
        sizes_there = required.get(name) or optional.get(name)
        if sizes_there is None:
            message = f"tensor {name[:60]} is not one that a model of `{header.architecture}` has"
            raise GgufError(message, hint=_OTHERS_WEIGHTS)
        if tensor.shape != sizes_there:
            message = f"tensor {name} has the sizes {list(tensor.shape)}, by its metadata {list(sizes_there)}"
            raise GgufError(message, hint=_OTHERS_WEIGHTS)


def _tensors_of(layout: Layout, sizes: _Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, sizes in the file's order) of every tensor that must be there."""
    queries, keys = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    hidden, wide, experts, narrow = sizes.hidden, sizes.intermediate, sizes.experts, sizes.expert_intermediate
    of_a_layer = {
        **dict.fromkeys(("attn_norm.weight", "ffn_norm.weight"), (hidden,)),
        "attn_q.weight": (hidden, queries),
        **dict.fromkeys(("attn_k.weight", "attn_v.weight"), (hidden, keys)),
        "attn_output.weight": (queries, hidden),
        "attn_q.bias": (queries,),
        **dict.fromkeys(("attn_k.bias", "attn_v.bias"), (keys,)),
        **dict.fromkeys(_HEAD_NORMS, (sizes.head_size,)),
        **dict.fromkeys(("ffn_gate.weight", "ffn_up.weight"), (hidden, wide)),
        "ffn_down.weight": (wide, hidden),
        "ffn_gate_inp.weight": (hidden, experts),
        **dict.fromkeys(("ffn_gate_exps.weight", "ffn_up_exps.weight"), (hidden, narrow, experts)),
        "ffn_down_exps.weight": (narrow, hidden, experts),
    }
    yield EMBEDDING, (hidden, sizes.vocab)
    yield _NORM, (hidden,)
    for layer in range(min(sizes.layers, 1 << 12)):
        yield from ((f"blk.{layer}.{name}", of_a_layer[name]) for name in layout.layer)


def _epsilon(header: Header) -> float:
    key = f"{header.architecture}.attention.layer_norm_rms_epsilon"
    value = header.fraction(key)
    if value is None or not 0 < value < 1:
        raise GgufError(f"its {key} is {header.metadata.get(key)!r:.40}", hint="convert the model again")
    return float(f"{value:.7g}")  # of a float32: 1e-5 is written as 9.999999747378752e-06


def _rope(header: Header, *, sizes: _Sizes, factors: tuple[float, ...]) -> dict[str, Any]:
    """Make transformers' `rope_parameters`. Llama 3.1's scaling is in the file as what each frequency is divided by."""
    key = f"{header.architecture}.rope.freq_base"
    theta = header.fraction(key) if key in header.metadata else 10_000.0  # llama.cpp's own
    if theta is None or not 1 < theta < 1e12:
        raise GgufError(f"its {key} is {header.metadata.get(key)!r:.40}", hint="convert the model again")
    default = {"rope_type": DEFAULT_ROPE, "rope_theta": theta}
    if not factors or all(factor == 1 for factor in factors):
        return default
    scaled = {
        **default,
        "rope_type": LLAMA3,
        "factor": max(factors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = _llama3_factors(scaled, head_size=sizes.head_size)
    if not all(math.isclose(*pair, rel_tol=1e-4) for pair in zip(factors, expected, strict=True)):
        message = f"its {ROPE_FACTORS} scales positions differently from Llama 3.1"
        raise GgufError(message, hint=_OTHERS_WEIGHTS)
    return scaled


def _llama3_factors(rope: Mapping[str, Any], *, head_size: int) -> list[float]:
    """Return divisors of the frequencies in Llama 3.1: 1 for short wavelengths, `factor` for long ones, between them
    from one to the other."""
    low, high, before = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for channel in range(0, head_size, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (channel / head_size)
        smooth = min(1.0, max(0.0, (before / wavelength - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors

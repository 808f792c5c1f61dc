"""What a model family is: one row per model class that the quantised engine knows. No torch.

A new family is a row here, and where vLLM builds it of layers that `engine/config.py` does not list, those there;
and its row in the matrix test with the real class. Most have the decoder layer of Llama, which is the default.
A dense decoder without a row is checked by its structure (engine/structure.py). What can be smoothed in it is found by
trying (quant/layer_units.py); it gets no one flow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.errors import EngineError
from appliance.terms.ropes import DEFAULT_ROPE, LLAMA3

EXPERTS, ROUTER = "mlp.experts", "mlp.gate"  # below a decoder layer, as all names here
GATE_UP, DOWN = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"  # of all experts at once, as transformers has them
EXPERT_PARTS = {GATE_UP: ("gate_proj", "up_proj"), DOWN: ("down_proj",)}  # of one expert, as checkpoints have them
ONE_EXPERT = re.compile(r"mlp\.experts\.\d+\.(?:gate|up)_proj\.weight")  # what GATE_UP stands for


def packed_parts(name: str) -> tuple[str, tuple[str, ...]]:
    """Return the name of the layer and the parts of an expert that are stacked along N, for a tensor [E, N, K] with all
    experts' weights, as transformers 5 has them. Empty for any other name."""
    found = next((packed for packed in EXPERT_PARTS if name.endswith(packed)), "")
    return (name.removesuffix(found) + EXPERTS, EXPERT_PARTS[found]) if found else ("", ())


VALUES = "self_attn.v_proj"  # several query heads may read one of its heads

_DECODER_LAYER = re.compile(r"(?P<prefix>.*\.layers\.\d+\.)(?P<rest>.+)")


@dataclass(frozen=True)
class Unit:
    """One quantised layer of the engine, or one of the two GEMMs of all experts."""

    members: tuple[str, ...]
    """Linear layers that the unit fuses."""
    norm: str = ""
    """Norm whose output the members read, or empty."""
    through: str = ""
    """Linear layer whose output the members read channel by channel, so that a factor of one of its rows reaches their
    column of that channel unchanged; or empty. Attention passes on factors of values, SwiGLU those of `up_proj`."""
    fused: str = ""
    """Name that the engine has for several members, or empty."""
    followers: tuple[str, ...] = ()
    """Other layers that read the norm and stay in BF16."""
    ignored_as: tuple[str, ...] = ()
    """Names of the unit in an `ignore` list, where they are not the members."""

    @property
    def layer(self) -> tuple[str, ...]:
        """Names of the unit in an `ignore` list."""
        return self.ignored_as or self.members


_ATTENTION = (
    Unit(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), norm="input_layernorm", fused="self_attn.qkv_proj"
    ),
    Unit(("self_attn.o_proj",), through=VALUES),
)
_MLP_NORM = "post_attention_layernorm"
_DENSE = (
    *_ATTENTION,
    Unit(("mlp.gate_proj", "mlp.up_proj"), norm=_MLP_NORM, fused="mlp.gate_up_proj"),
    Unit(("mlp.down_proj",), through="mlp.up_proj"),
)
_MIXTURE = (
    *_ATTENTION,
    Unit((GATE_UP,), norm=_MLP_NORM, followers=(ROUTER,), ignored_as=(EXPERTS,)),
    Unit((DOWN,), ignored_as=(EXPERTS,)),
)


@dataclass(frozen=True)
class Family:
    """A model class that the quantised engine knows. A row also says that vLLM's class does nothing in `load_weights`
    but find a tensor's place (engine/routes.py)."""

    architecture: str
    """The model's class, as `architectures` in a checkpoint's config.json names it."""
    model_type: str
    """Name of the model type in config.json."""
    dense: tuple[Unit, ...] = _DENSE
    """Units of a decoder layer without experts."""
    mixture: tuple[Unit, ...] = ()
    """Units of a decoder layer with experts; empty where the family has none."""
    one_flow: bool = False
    """Whether `trainer/rollout_forward.py` can compute the forward: it is Llama's, with no further product or sum."""

    def units(self, parameters: Iterable[str]) -> tuple[Unit, ...]:
        """Return the units of a decoder layer with these parameters."""
        return self.mixture if self.mixture and GATE_UP in set(parameters) else self.dense


FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        Family("Qwen2ForCausalLM", "qwen2", one_flow=True),  # Qwen2.5 too
        Family("Qwen3ForCausalLM", "qwen3", one_flow=True),
        Family("LlamaForCausalLM", "llama", one_flow=True),
        Family("MistralForCausalLM", "mistral", one_flow=True),
        Family("Qwen3MoeForCausalLM", "qwen3_moe", mixture=_MIXTURE),
    )
}
_PATTERNS = tuple(dict.fromkeys(units for each in FAMILIES.values() for units in (each.dense, each.mixture) if units))

LLAMA_NORMS: Mapping[str, tuple[str, ...]] = {unit.norm: unit.members for unit in _DENSE if unit.norm}
"""Norms of a dense decoder layer such as Llama's, with the linear layers that read each."""

FUSED_LAYERS: Mapping[str, list[str]] = {
    unit.fused.rpartition(".")[2]: [member.rpartition(".")[2] for member in unit.members]
    for units in _PATTERNS
    for unit in units
    if unit.fused
}
"""Parts of a fused layer, in their order, in every family: `qkv_proj` is q_proj, k_proj and v_proj. vLLM's own
`packed_modules_mapping` of Qwen3-MoE lacks `gate_up_proj` where dense layers come from `decoder_sparse_step`."""
_FUSED_WITH = {part: fused for fused, parts in FUSED_LAYERS.items() for part in parts}


def names_of_parts(name: str) -> list[str]:
    """Return the names of the parts of a parameter, where it is a fused layer's; else the name alone."""
    layer, _, kind = name.rpartition(".")
    parent, _, leaf = layer.rpartition(".")
    return [f"{parent}.{part}.{kind}" for part in FUSED_LAYERS.get(leaf, ())] or [name]


def name_when_fused(name: str) -> str:
    """Return the name that a parameter's layer has where it is fused with others: `….qkv_proj.weight` for
    `….v_proj.weight`; the name itself where it never is."""
    layer, _, kind = name.rpartition(".")
    parent, _, leaf = layer.rpartition(".")
    return f"{parent}.{_FUSED_WITH[leaf]}.{kind}" if leaf in _FUSED_WITH else name


def unlisted(architectures: Iterable[str]) -> str:
    """Return the first of a model's classes that has no row here, or an empty text. A dense model without a row is
    checked by its structure (engine/structure.py)."""
    return next((name for name in architectures if name not in FAMILIES), "")


NEEDS_A_ROW = (
    "UAQ, experts, adapters that are sent alone and the rollouts' forward in the trainer are for families of the list"
)


def why_unknown(architectures: Sequence[str] | None) -> str:
    """Return why a model with these `architectures` gets nothing that needs a row here, or an empty text."""
    known = ", ".join(FAMILIES)
    if not architectures:
        return f"the model's configuration names no architecture; the known ones are {known}"
    name = unlisted(architectures)
    return f"{name} is not in the list of model families ({known}): {NEEDS_A_ROW}" if name else ""


def why_own_attention(architecture: str) -> str:
    """Say why a class that takes no other attention than its own cannot be trained."""
    why = "the trainer packs several sequences into one row, and they would see each other"
    return f"{architecture} computes attention by code of its own: {why}"


REMEDY_OF_OWN_ATTENTION = "take another model: docs/quantization.md names classes that can be trained"

UNLIKE_WINDOWS = {
    "Qwen3ForCausalLM": "the trainer goes by layer_types, vLLM treats all layers alike",
    "LlamaForCausalLM": "vLLM goes by layer_types, the trainer gives no layer a window",
    "MistralForCausalLM": "vLLM goes by layer_types, the trainer gives every layer the window",
    "Qwen3MoeForCausalLM": "neither vLLM nor the trainer goes by layer_types",
    "Cohere2ForCausalLM": "since vLLM 0.29 a token there sees one token more than in the trainer",
}
"""Differences for a model with a sliding window in a part of its layers, by its architecture: between vLLM, which
generates, and transformers, which trains."""
ALIKE_WINDOWS = frozenset({"Gemma2ForCausalLM", "Gemma3ForCausalLM"})
"""Classes of which vLLM and transformers both give the same layers a window (tests/engine/test_engine_structure.py)."""
ALWAYS_PARTIAL = "Cohere2ForCausalLM"  # without layer_types, too
NEVER_PARTIAL = "Qwen2ForCausalLM"  # vLLM's class of it asserts that all layers have a sliding window, or none
_ROPES = (DEFAULT_ROPE, LLAMA3)


def beyond_one_flow(config: Mapping[str, Any]) -> str:
    """Return what a checkpoint asks for that vLLM has and the trainer's form of the rollouts' forward does not have, or
    an empty text; some of it transformers does not have either. config: its config.json, or what transformers makes of
    it."""
    if has_both_windows(config):
        return "layers with and without a sliding window"
    found = config.get("rope_scaling") or config.get("rope_parameters")
    rope = found if isinstance(found, dict) else {}
    kind = rope.get("rope_type", rope.get("type", DEFAULT_ROPE))
    if kind not in _ROPES:
        return f"rope_type {str(kind)[:60]}"
    others = {
        "logit_scale": config.get("logit_scale") or 1,
        "partial_rotary_factor": rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1,
        "head_dtype": int(config.get("head_dtype") is None),
        "dual_chunk_attention_config": int(not config.get("dual_chunk_attention_config")),
    }
    return ", ".join(name for name, value in others.items() if value != 1)


_WINDOWS_BUT_EVERY = {"cohere2": 4, "gemma2": 2, "gemma3_text": 6}
"""Number of layers of which the last has no window, by the model's type: what transformers makes of a config.json that
has no `layer_types`, as published ones have not, and no `sliding_window_pattern`."""


def has_both_windows(config: Mapping[str, Any]) -> bool:
    """Return whether layers with and without a sliding window are mixed, by `layer_types` or as transformers reads the
    older keys: of Cohere and Gemma, and of Qwen."""
    layers = config.get("layer_types")
    if isinstance(layers, list):
        return len(set(map(str, layers))) > 1
    if (usual := _WINDOWS_BUT_EVERY.get(str(config.get("model_type")))) is not None:
        every = config.get("sliding_window_pattern", usual)
        return isinstance(every, int) and every > 1
    first, count = config.get("max_window_layers", 28), config.get("num_hidden_layers")
    slides = bool(config.get("use_sliding_window") and config.get("sliding_window", 4096))
    return slides and isinstance(first, int) and isinstance(count, int) and 0 < first < count


@dataclass(frozen=True)
class NormFed:
    """Parameters by their names in a checkpoint."""

    norms: frozenset[str]
    """Norms of all decoder layers."""
    linears: frozenset[str]
    """Layers that the norms feed, with the input channels last; in a mixture the router is one of them."""


def norm_fed(names: Iterable[str]) -> NormFed:
    """Find a model's norms and the layers that they feed. names: of all its parameters. Raises EngineError for a model
    without the pattern of norms and layers. The last norm is left out: the head, which it feeds, stays in BF16 in
    rollouts and may be tied to the embedding."""
    layers: dict[str, set[str]] = {}
    for name in names:
        if found := _DECODER_LAYER.fullmatch(name):
            layers.setdefault(found["prefix"], set()).add(found["rest"])
    if not layers:
        raise EngineError("the model has no decoder layers by the names `….layers.<n>.…`")
    norms, linears = set[str](), set[str]()
    for prefix, have in layers.items():
        norms_here, linears_here = min(
            (_fed(units, have=have) for units in _PATTERNS), key=lambda fed: len((fed[0] | fed[1]) - have)
        )
        if missing := sorted((norms_here | linears_here) - have):
            raise EngineError(f"{prefix[:-1]} has no {', '.join(missing)}")
        norms |= {prefix + name for name in norms_here}
        linears |= {prefix + name for name in linears_here}
    return NormFed(frozenset(norms), frozenset(linears))


def _fed(units: tuple[Unit, ...], *, have: set[str]) -> tuple[set[str], set[str]]:
    """Return the norms of a decoder layer, and what they feed. have: its parameters, with experts at once or one by
    one."""
    fed = [unit for unit in units if unit.norm]
    linears = {f"{name}.weight" for unit in fed for name in (*unit.members, *unit.followers) if name != GATE_UP}
    if any(GATE_UP in unit.members for unit in fed):
        linears |= {name for name in have if name == GATE_UP or ONE_EXPERT.fullmatch(name)} or {GATE_UP}
    return {f"{unit.norm}.weight" for unit in fed}, linears

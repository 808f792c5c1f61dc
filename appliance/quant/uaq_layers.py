"""Which parameters UAQ scales, by their names in a checkpoint. Imports no torch.

Every linear layer that a decoder layer's norm feeds: q, k, v of the attention; gate and up of the MLP; in a mixture of
experts gate and up of every expert and the router, which reads the same norm. The last norm is left out, because what
it feeds (the head) stays BF16 in rollouts and may be tied to the embedding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from appliance.errors import EngineError

MARK_FILE = "uaq.json"  # in a scaled folder: says that it is one
MOST = 4096.0  # of a scale, either way: far beyond any use, and far inside every format's exponents
_INPUT_NORM, _MLP_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"
_QKV = tuple(f"self_attn.{letter}_proj.weight" for letter in "qkv")
_DENSE = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
_ROUTER, _FUSED_EXPERTS = "mlp.gate.weight", "mlp.experts.gate_up_proj"
_EXPERT = re.compile(r"mlp\.experts\.\d+\.(?:gate|up)_proj\.weight")
_LAYER = re.compile(r"(?P<prefix>.*\.layers\.\d+\.)(?P<rest>.+)")
_HINT = "leave out correction.uaq_scale"


@dataclass(frozen=True)
class NormFed:
    """norms: multiplied by the scale.  linears: divided by it, with the input channels last."""

    norms: frozenset[str]
    linears: frozenset[str]

    def factors(self, scale: float) -> Mapping[str, float]:
        """What each parameter is multiplied by; 1 / scale gives the way back."""
        return dict.fromkeys(self.norms, scale) | dict.fromkeys(self.linears, 1 / scale)


def norm_fed(names: Iterable[str]) -> NormFed:
    """names: of all parameters of a model. Raises EngineError for a model without the pattern of norms and layers."""
    layers: dict[str, set[str]] = {}
    for name in names:
        if found := _LAYER.fullmatch(name):
            layers.setdefault(found["prefix"], set()).add(found["rest"])
    if not layers:
        raise EngineError("UAQ: the model has no decoder layers by the names `….layers.<n>.…`", hint=_HINT)
    norms, linears = set(), set()
    for prefix, have in layers.items():
        reads = {*_QKV, *_mlp(have)}
        if missing := sorted({_INPUT_NORM, _MLP_NORM, *reads} - have):
            raise EngineError(f"UAQ: {prefix[:-1]} has no {', '.join(missing)}", hint=_HINT)
        norms |= {prefix + _INPUT_NORM, prefix + _MLP_NORM}
        linears |= {prefix + linear for linear in reads}
    return NormFed(frozenset(norms), frozenset(linears))


def _mlp(have: set[str]) -> set[str]:
    """What the second norm feeds: in a mixture experts by themselves or all in one parameter, and their router."""
    experts = {name for name in have if name == _FUSED_EXPERTS or _EXPERT.fullmatch(name)}
    return {_ROUTER, *experts} if experts else set(_DENSE)

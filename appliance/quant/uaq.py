"""UAQ, update-aware quantisation: a model rescaled once before training, so that the same update moves more INT8 codes.

Every linear layer fed by a decoder layer's norm gets W / s, and that norm gets its weight times s: s cancels and the
function is the same. The layers are those of `quant/smoothing.py`, with one scale for all channels: q, k, v, gate, up,
experts and their router. The last norm is left out, because what it feeds (the head) stays BF16 in rollouts and may be
tied to the embedding.

s is a power of two here, where the source takes 1.5: then every weight keeps its bits but for the exponent, the
function is unchanged bit for bit instead of to rounding, the INT8 codes before training are the very same, and folding
back gives the very same file. With absmax scales s therefore changes nothing but how an update of Adam's, whose size
does not depend on the gradient's, compares with the weight: it is s times larger. Whether that is more than a larger
learning rate on the same layers is a question for an experiment.

Source: QuRL, arXiv 2602.13953; read from notes on it.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from appliance.errors import EngineError
from appliance.quant.architectures import why_unknown
from appliance.quant.smoothing import MAX_EXPONENT, Smoothing, SmoothingGroup, fold

_INPUT_NORM, _MLP_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"
_QKV = tuple(f"self_attn.{letter}_proj.weight" for letter in "qkv")
_DENSE = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
_ROUTER, _FUSED_EXPERTS = "mlp.gate.weight", "mlp.experts.gate_up_proj"
_EXPERT = re.compile(r"mlp\.experts\.\d+\.(?:gate|up)_proj\.weight")
_LAYER = re.compile(r"(?P<prefix>.*\.layers\.\d+\.)(?P<rest>.+)")


def uaq_smoothing(shapes: Mapping[str, tuple[int, ...]], *, scale: float) -> Smoothing:
    """What `fold` applies to a model's parameters to scale it; with 1 / scale, what takes it back.

    shapes: of all parameters by their names in the checkpoint.  scale: s, a power of two in 2^±MAX_EXPONENT, not 1.
    Raises ValueError for another scale, EngineError for a model without the pattern of norms and layers.
    """
    if not is_uaq_scale(scale):
        raise ValueError(f"the scale of UAQ is a power of two other than 1, got {scale:g}")
    layers: dict[str, set[str]] = {}
    for name in shapes:
        if found := _LAYER.fullmatch(name):
            layers.setdefault(found["prefix"], set()).add(found["rest"])
    if not layers:
        raise EngineError("UAQ: the model has no decoder layers by the names `….layers.<n>.…`")
    groups = []
    for prefix, names in layers.items():
        for norm, linears in ((_INPUT_NORM, _QKV), (_MLP_NORM, _mlp_of(names))):
            if missing := sorted({norm, *linears} - names - {_FUSED_EXPERTS}):
                raise EngineError(f"UAQ: {prefix[:-1]} has no {', '.join(missing)}", hint="leave out uaq_scale")
            scale_K = torch.full(shapes[prefix + norm], 1 / scale)
            groups.append(SmoothingGroup(prefix + norm, tuple(prefix + linear for linear in linears), scale_K))
    return Smoothing(tuple(groups))


def is_uaq_scale(scale: float) -> bool:
    """Whether it is a power of two, not 1, that `fold` takes. scale: finite."""
    mantissa, exponent = math.frexp(scale)
    return mantissa == 0.5 and exponent != 1 and abs(exponent - 1) <= MAX_EXPONENT


def scale_folder(source: Path, *, target: Path, scale: float) -> None:
    """A copy of a model's folder, scaled; with 1 / scale a scaled one's way back. Holds one of its files in memory.

    target: must not exist.  Raises EngineError for a model that cannot be scaled or read, NumericsError when a weight
    leaves its format's exponents, ValueError for a scale that is no power of two.
    """
    files = sorted(source.glob("*.safetensors"))
    if not files or not (source / "config.json").is_file():
        raise EngineError(f"{source}: no model of config.json and *.safetensors")
    if why := why_unknown(json.loads((source / "config.json").read_text()).get("architectures")):
        raise EngineError(f"UAQ: {why}", hint="leave out uaq_scale")
    smoothing = uaq_smoothing(_shapes(files), scale=scale)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in files:
        with safe_open(file, framework="pt") as opened:
            tensors = {name: fold(name, opened.get_tensor(name), smoothing=smoothing) for name in opened.keys()}  # noqa: SIM118
            save_file(tensors, target / file.name, metadata=opened.metadata())


def _mlp_of(names: set[str]) -> tuple[str, ...]:
    is_mixture = _FUSED_EXPERTS in names or any(_EXPERT.fullmatch(name) for name in names)
    return (_ROUTER, _FUSED_EXPERTS) if is_mixture else _DENSE


def _shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise EngineError(f"{file}: safetensors that cannot be read: {error}") from error
    return shapes

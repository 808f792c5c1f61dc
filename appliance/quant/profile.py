"""A model's profile: what calibration, or a donor checkpoint, found out about it, and the smoothing in it. One file,
`profile.safetensors`: vectors of the model and a JSON header, no code, so that a profile can be passed on.

Smoothing moves an activation's large channels into the weights that read them. Between a norm and everything it feeds
there is a channel K of the residual stream's width. With s_k > 0

    norm'_k = norm_k / s_k          w'_nk = w_nk * s_k         so that   w' (norm' * h) = w (norm * h)

Every s_k is a power of two, so both changes are exact in BF16 and in float32, every product w_nk * x_k keeps its very
bits, and the function is unchanged bit for bit. Only a result outside the format's exponents could break that, and is
refused. Source of the idea: Xiao et al. 2023, SmoothQuant; the restriction to powers of two is ours.

Legend: N output channels, K input channels, E experts.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from appliance.errors import EngineError, NumericsError
from appliance.files import whole_file
from appliance.quant.files import (
    HEADER_KEY,
    PROFILE_FILE,
    SCHEMA_VERSION,
    SMOOTHING,
    LayerError,
    Memory,
    Origin,
    Predicted,
    Settings,
    read_file_header,
)
from appliance.terms.families import FUSED_LAYERS, GATE_UP, ONE_EXPERT
from appliance.terms.schemes import Scheme

ACTIVATION = "activation."
INPUT_SCALE = "input_scale."
OUTPUT_SCALE = "output_scale."
MAX_EXPONENT = 12  # of a scale: 2^-12..2^12 is exact in BF16, float16 and float32


@dataclass(frozen=True)
class SmoothingGroup:
    """One norm and all that reads it, by the names of their parameters in the checkpoint."""

    norm: str
    linears: tuple[str, ...]
    """Each with K last: `….q_proj.weight` [N, K], a router `….mlp.gate.weight` [E, K], or all experts at once,
    `….mlp.experts.gate_up_proj` [E, 2N, K], which also stands for `….experts.<i>.{gate,up}_proj.weight` [N, K]."""
    scale_K: Tensor
    """[K] float32 on the CPU, powers of two in 2^±MAX_EXPONENT: the norm is divided by it."""

    def __post_init__(self) -> None:
        mantissa_K, exponent_K = torch.frexp(self.scale_K)
        if self.scale_K.dtype is not torch.float32 or self.scale_K.ndim != 1:
            raise ValueError(f"{self.norm}: scales are a float32 vector, not {self.scale_K.dtype}")
        if not bool(((mantissa_K == 0.5) & ((exponent_K - 1).abs() <= MAX_EXPONENT)).all()):
            raise ValueError(
                f"{self.norm}: a scale is not a power of two between 2^-{MAX_EXPONENT} and 2^{MAX_EXPONENT}"
            )


@dataclass(frozen=True)
class Smoothing:
    """All groups of a model; none changes nothing."""

    groups: tuple[SmoothingGroup, ...] = ()

    def factor_of(self, name: str) -> Tensor | None:
        """[K] float32: what the parameter's last dimension is multiplied by; None for one that smoothing leaves."""
        return self._factors.get(_key(_parts(name)[0]))  # what is fused reads one norm

    @functools.cached_property
    def _factors(self) -> Mapping[str, Tensor]:
        norms = {group.norm: group.scale_K.reciprocal() for group in self.groups}
        return norms | {_key(linear): group.scale_K for group in self.groups for linear in group.linears}


def fold(name: str, tensor: Tensor, *, smoothing: Smoothing) -> Tensor:
    """The parameter with smoothing folded in: itself when smoothing leaves it, else a new tensor of the same format.

    name: in the checkpoint.  tensor: [..., K] bfloat16, float16 or float32, on any device, a whole parameter or any
    slice of it that keeps K whole.
    Raises NumericsError when a value leaves the format's exponents or is not finite, EngineError when K is another one.
    """
    factor_K = smoothing.factor_of(name)
    if factor_K is None:
        return tensor
    if tensor.ndim == 0 or tensor.shape[-1] != factor_K.shape[0]:
        message = f"the profile's smoothing has {factor_K.shape[0]} channels for {name}, which is {list(tensor.shape)}"
        raise EngineError(message, hint="the profile is of another model: make it again with `appliance profile`")
    factor_K = factor_K.to(device=tensor.device)
    folded = tensor * factor_K.to(tensor.dtype)
    # Exact means that the way back is the identity. It also fails for what is not finite.
    if not torch.equal(folded * factor_K.reciprocal().to(tensor.dtype), tensor):
        kind = str(tensor.dtype).removeprefix("torch.")
        raise NumericsError(f"{name}: a value times its smoothing scale does not fit {kind}, or is not finite")
    return folded


def require_all_folded(names: Iterable[str], *, smoothing: Smoothing) -> None:
    """names: every parameter of a model that `fold` was given. Raises EngineError when a part of a group was not among
    them: its norm and its layers would not belong together."""
    folded = {_key(part) for name in names for part in _parts(name)}
    parts = [part for group in smoothing.groups for part in (group.norm, *group.linears)]
    missing = [part for part in parts if _key(part) not in folded]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        message = f"the profile smooths {missing[0]}{more}, which this model does not have"
        raise EngineError(message, hint="the profile is of another model: make it again with `appliance profile`")


def power_of_two(scale_K: Tensor) -> Tensor:
    """The nearest power of two of each scale (in the exponent), within 2^±MAX_EXPONENT. scale_K: float, > 0."""
    exponent_K = scale_K.double().log2().round().clamp(-MAX_EXPONENT, MAX_EXPONENT)
    return torch.exp2(exponent_K).float()


def _key(name: str) -> str:
    return ONE_EXPERT.sub(GATE_UP, name)


def _parts(name: str) -> list[str]:
    """A parameter's own name, or those of its parts where it is a fused layer's."""
    layer, _, kind = name.rpartition(".")
    parent, _, leaf = layer.rpartition(".")
    return [f"{parent}.{part}.{kind}" for part in FUSED_LAYERS.get(leaf, ())] or [name]


@dataclass(frozen=True)
class Profile:
    origin: Origin
    scheme: Scheme
    settings: Settings
    smoothing: Smoothing
    layers: tuple[LayerError, ...] = ()
    """Of a calibration only."""
    predicted: Predicted | None = None
    """Of a calibration only."""
    memory: Memory | None = None
    """Of a calibration only."""
    activations: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    """[K] float32, largest |x| per input channel before smoothing, by a linear's name."""
    input_scales: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    """Of a donor, by a parameter's name, as FlashRL has them: codes are round(w_nk * output_scale_n *
    input_scale_k)."""
    output_scales: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    """Of a donor, by a parameter's name, as FlashRL has them."""

    @property
    def suggested_ignore(self) -> tuple[str, ...]:
        """The user's `ignore` and then the layers that the error budget keeps in BF16, each once."""
        kept = (name for layer in self.layers if layer.kept for name in layer.layer)
        return tuple(dict.fromkeys((*self.settings.ignore, *kept)))

    def header(self) -> dict:
        """What the file's header holds: JSON types only."""
        return {
            "schema_version": SCHEMA_VERSION,
            **dataclasses.asdict(dataclasses.replace(self.origin, versions={})),
            "versions": dict(self.origin.versions),
            "scheme": str(self.scheme),
            "settings": dataclasses.asdict(self.settings),
            "smoothing": [{"norm": each.norm, "linears": list(each.linears)} for each in self.smoothing.groups],
            "layers": [dataclasses.asdict(each) for each in self.layers],
            "suggested_ignore": list(self.suggested_ignore),
            "predicted": dataclasses.asdict(self.predicted) if self.predicted else None,
            "memory": dataclasses.asdict(self.memory) if self.memory else None,
        }


def write_profile(profile: Profile, *, folder: Path) -> Path:
    """Write `profile.safetensors` into the folder and return its path. The file appears whole or not at all."""
    kinds = {
        SMOOTHING: {group.norm: group.scale_K for group in profile.smoothing.groups},
        ACTIVATION: profile.activations,
        INPUT_SCALE: profile.input_scales,
        OUTPUT_SCALE: profile.output_scales,
    }
    copies = {
        kind + name: tensor.detach().cpu().contiguous().clone()
        for kind, tensors in kinds.items()
        for name, tensor in tensors.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / PROFILE_FILE
    with whole_file(target) as partial:
        save_file(copies, partial, metadata={HEADER_KEY: json.dumps(profile.header())})
    return target


def load_smoothing(profile_dir: Path) -> Smoothing:
    """The smoothing of a profile. profile_dir: the folder, or the `profile.safetensors` in it. Raises EngineError when
    there is no profile, or it cannot be read."""
    header = read_file_header(profile_dir)
    file = profile_dir / PROFILE_FILE if profile_dir.is_dir() else profile_dir
    try:
        with safe_open(file, framework="pt") as profile:
            scales = {group["norm"]: profile.get_tensor(SMOOTHING + group["norm"]) for group in header["smoothing"]}
        groups = (
            SmoothingGroup(each["norm"], tuple(each["linears"]), scales[each["norm"]]) for each in header["smoothing"]
        )
        return Smoothing(tuple(groups))
    except (SafetensorError, ValueError) as error:
        hint = "make one with `appliance profile`"
        raise EngineError(f"{file}: not a profile that can be read: {error}", hint=hint) from error

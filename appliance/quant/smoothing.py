"""Smoothing: an activation's large channels moved into the weights that read them, without changing the function.

Between a norm and everything it feeds there is a channel K of the residual stream's width. With s_k > 0

    norm'_k = norm_k / s_k          w'_nk = w_nk * s_k         so that   w' (norm' * h) = w (norm * h)

Every s_k is a power of two, so both changes are exact in BF16 and in float32, every product w_nk * x_k keeps its very
bits, and the function is unchanged bit for bit. Only a result outside the format's exponents could break that, and is
refused. Source of the idea: Xiao et al. 2023, SmoothQuant; the restriction to powers of two is ours.

Legend: N output channels, K input channels, E experts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from appliance.errors import EngineError, NumericsError
from appliance.quant.files import PROFILE_FILE, parse_header
from appliance.terms.families import GATE_UP, ONE_EXPERT

MAX_EXPONENT = 12  # of a scale: 2^-12..2^12 is exact in BF16, float16 and float32


@dataclass(frozen=True)
class SmoothingGroup:
    """One norm and all that reads it, by the names of their parameters in the checkpoint.

    linears: each with K last: `….q_proj.weight` [N, K], a router `….mlp.gate.weight` [E, K], or all experts at once,
    `….mlp.experts.gate_up_proj` [E, 2N, K], which also stands for `….experts.<i>.{gate,up}_proj.weight` [N, K].
    scale_K: [K] float32 on the CPU, powers of two in 2^±MAX_EXPONENT: the norm is divided by it.
    """

    norm: str
    linears: tuple[str, ...]
    scale_K: Tensor

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
        return self._factors.get(_key(name))

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
        raise NumericsError(f"{name}: a value times its smoothing scale does not fit {_short(tensor.dtype)}")
    return folded


def require_all_folded(names: Iterable[str], *, smoothing: Smoothing) -> None:
    """names: every parameter of a model that `fold` was given.

    Raises EngineError when a part of a group was not among them: its norm and its layers would not belong together.
    """
    folded = {_key(name) for name in names}
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


def load_smoothing(profile_dir: Path) -> Smoothing:
    """The smoothing of a profile. profile_dir: the folder, or the `profile.safetensors` in it.

    Raises EngineError when there is no profile, or it cannot be read.
    """
    file = profile_dir / PROFILE_FILE if profile_dir.is_dir() else profile_dir
    hint = "make one with `appliance profile`"
    if not file.is_file():
        raise EngineError(f"{file}: no such profile", hint=hint)
    try:
        with safe_open(file, framework="pt") as profile:
            header = parse_header(profile.metadata(), file=file)
            return Smoothing(
                tuple(
                    SmoothingGroup(
                        norm=group["norm"],
                        linears=tuple(group["linears"]),
                        scale_K=profile.get_tensor(scale_key(group["norm"])),
                    )
                    for group in header["smoothing"]
                )
            )
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise EngineError(f"{file}: not a profile that can be read: {error}", hint=hint) from error


def scale_key(norm: str) -> str:
    """The name of a group's scales in the profile's file."""
    return f"smoothing.{norm}"


def _key(name: str) -> str:
    return ONE_EXPERT.sub(GATE_UP, name)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

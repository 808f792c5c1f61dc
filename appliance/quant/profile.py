"""A model's profile: what calibration, or a donor checkpoint, found out about it, and the smoothing in it. One file,
`profile.safetensors`: vectors of the model and a JSON header, no code, so that a profile can be passed on.

Smoothing moves an activation's large channels into the weights that read them. Between what gives an activation and
everything that reads it there are K channels. With s_k > 0

    source'_k = source_k / s_k      w'_nk = w_nk * s_k         so that   w' (source' h) = w (source h)

The source is a norm, whose weight has one number for each channel, or a linear layer, whose rows and bias make the
channels. What lies between the source and its readers must pass a factor of a channel on as it is. A product with
something else does (SwiGLU: down_proj reads silu(gate) * up), and so does a sum over tokens (attention: o_proj reads
the values of v_proj, where several query heads read one head of v_proj and so share its factors).

Every s_k is a power of two, so all changes are exact in BF16 and in float32, every product w_nk * x_k keeps its very
bits, and the function is unchanged bit for bit. Only a result outside the format's exponents could break that, and is
refused. Source of the idea: Xiao et al. 2023, SmoothQuant; the restriction to powers of two is ours.

Legend: N output channels, K input channels, E experts.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    NotSmoothed,
    Origin,
    Predicted,
    Settings,
    read_file_header,
)
from appliance.terms.families import FUSED_LAYERS, GATE_UP, ONE_EXPERT, names_of_parts
from appliance.terms.schemes import Scheme

ACTIVATION = "activation."
INPUT_SCALE = "input_scale."
OUTPUT_SCALE = "output_scale."
MAX_EXPONENT = 12  # of a scale: 2^-12..2^12 is exact in BF16, float16 and float32


@dataclass(frozen=True, eq=False)
class SmoothingGroup:
    """Source of an activation and all that reads it, by the names of their parameters in the checkpoint."""

    source: str
    """Name of the source: the weight of a norm [K], or of a linear layer [K, J], whose bias [K], where it has one,
    belongs to it."""
    linears: tuple[str, ...]
    """Names of the linear layers that read the source, each with its input channels last: `….q_proj.weight` [N, K], a
    router `….mlp.gate.weight` [E, K], or all experts at once, `….mlp.experts.gate_up_proj` [E, 2N, K], which also
    stands for `….experts.<i>.{gate,up}_proj.weight`."""
    scale_K: Tensor
    """Scales, [K] float32 on the CPU, powers of two in 2^±MAX_EXPONENT: the source is divided by them."""
    head_dim: int = 0
    """Channels of an attention head where the source is `v_proj`; 0 elsewhere."""
    readers_of_head: int = 1
    """Query heads that read one head of the source: the linears have as many times K channels."""

    def __post_init__(self) -> None:
        mantissa_K, exponent_K = torch.frexp(self.scale_K)
        if self.scale_K.dtype is not torch.float32 or self.scale_K.ndim != 1:
            raise ValueError(f"{self.source}: scales are a float32 vector, not {self.scale_K.dtype}")
        if not bool(((mantissa_K == 0.5) & ((exponent_K - 1).abs() <= MAX_EXPONENT)).all()):
            raise ValueError(
                f"{self.source}: a scale is not a power of two between 2^-{MAX_EXPONENT} and 2^{MAX_EXPONENT}"
            )
        if self.head_dim and len(self.scale_K) % self.head_dim:
            raise ValueError(f"{self.source}: {len(self.scale_K)} channels are no heads of {self.head_dim}")
        leaf = self.source.removesuffix(".weight").rpartition(".")[2]
        if not (leaf.endswith("norm") or any(leaf == parts[-1] for parts in FUSED_LAYERS.values())):
            raise ValueError(f"{self.source}: what it gives is not read channel by channel")

    @functools.cached_property
    def reader_scale_K(self) -> Tensor:
        """Factors by which the linears' channels are multiplied, [K] or, of attention heads, [readers_of_head * K]:
        query heads that read one head lie side by side."""
        if self.readers_of_head == 1:
            return self.scale_K
        return self.scale_K.view(-1, self.head_dim).repeat_interleave(self.readers_of_head, dim=0).flatten()


@dataclass(frozen=True)
class Smoothing:
    """Smoothing of a model: all of its groups. Without groups it changes nothing."""

    groups: tuple[SmoothingGroup, ...] = ()

    def __post_init__(self) -> None:
        sources = [group.source for group in self.groups]
        readers = [name for group in self.groups for name in {_key(linear) for linear in group.linears}]
        for names in (sources, readers):
            if repeated := [name for name, number in Counter(names).items() if number > 1]:
                raise ValueError(f"{repeated[0]}: two groups of smoothing have it")

    def column_factor_of(self, name: str) -> Tensor | None:
        """Return the factors of the parameter's last dimension, [K] float32; None for one that no group reads."""
        return self._column_factors.get(_key(names_of_parts(name)[0]))  # what is fused reads one source

    def row_factor_of(self, name: str) -> Tensor | None:
        """Return the factors of the parameter's first dimension, [N] float32; None for one that is no group's source.
        Of a fused layer these are its last rows: only the last part of one is a source."""
        return self._row_factors.get(names_of_parts(name)[-1])

    @functools.cached_property
    def _column_factors(self) -> Mapping[str, Tensor]:
        return {_key(linear): group.reader_scale_K for group in self.groups for linear in group.linears}

    @functools.cached_property
    def _row_factors(self) -> Mapping[str, Tensor]:
        factors = {group.source: group.scale_K.reciprocal() for group in self.groups}
        return factors | {f"{name.removesuffix('weight')}bias": factor for name, factor in factors.items()}


def fold(name: str, tensor: Tensor, *, smoothing: Smoothing) -> Tensor:
    """Fold smoothing into a parameter. Returns the parameter itself where smoothing leaves it, else a new tensor of the
    same format.

    name: in the checkpoint.  tensor: a whole parameter, bfloat16, float16 or float32, on any device. An engine that
    shares out rows or columns over ranks does so afterwards.
    Raises NumericsError when a value leaves the format's exponents or is NaN, EngineError for another shape than the
    smoothing's.
    """
    columns = _column_factor(name, tensor, weight=name, smoothing=smoothing)
    rows = _row_factor(name, tensor, weight=name, smoothing=smoothing)
    return _times(name, tensor, [*columns, *rows])


def fold_columns(name: str, a_RK: Tensor, *, weight: str, smoothing: Smoothing) -> Tensor:
    """Fold smoothing into the first matrix of an adapter, which reads what the layer reads. name: of the matrix, for
    errors.  a_RK: as `fold`'s tensor.  weight: name of the layer's weight. Raises what `fold` raises."""
    return _times(name, a_RK, [*_column_factor(name, a_RK, weight=weight, smoothing=smoothing)])


def fold_rows(name: str, b_NR: Tensor, *, weight: str, smoothing: Smoothing) -> Tensor:
    """Fold smoothing into the second matrix of an adapter, which adds to what the layer gives. name: of the matrix, for
    errors.  b_NR: as `fold`'s tensor.  weight: name of the layer's weight. Raises what `fold` raises."""
    return _times(name, b_NR, [*_row_factor(name, b_NR, weight=weight, smoothing=smoothing)])


def _times(name: str, tensor: Tensor, factors: list[Tensor]) -> Tensor:
    if not factors:
        return tensor
    folded = tensor * factors[0]
    for factor in factors[1:]:
        folded *= factor
    # Exact means that the way back is the identity. It also fails for NaN.
    restored = folded * factors[0].reciprocal()
    for factor in factors[1:]:
        restored *= factor.reciprocal()
    if not torch.equal(restored, tensor):
        if bool(torch.isnan(tensor).any()):
            raise NumericsError(f"{name}: a value is not finite")
        kind = str(tensor.dtype).removeprefix("torch.")
        raise NumericsError(f"{name}: a value times its smoothing scale does not fit {kind}")
    return folded


def _column_factor(name: str, tensor: Tensor, *, weight: str, smoothing: Smoothing) -> Iterator[Tensor]:
    """Yield what the tensor's columns are to be multiplied by, in its own format: none or one.

    weight: name of the parameter that has the columns in the checkpoint.
    """
    column_K = smoothing.column_factor_of(weight)
    if column_K is not None:
        if tensor.ndim == 0 or tensor.shape[-1] != len(column_K):
            raise _of_another_model(name, tensor, channels=len(column_K))
        yield column_K.to(tensor)


def _row_factor(name: str, tensor: Tensor, *, weight: str, smoothing: Smoothing) -> Iterator[Tensor]:
    """Yield what the tensor's rows are to be multiplied by, in its own format: none or one.

    weight: name of the parameter that has the rows in the checkpoint.
    """
    row_N = smoothing.row_factor_of(weight)
    if row_N is not None:
        rows = tensor.shape[0] if tensor.ndim in (1, 2) else 0
        is_fused = len(names_of_parts(weight)) > 1
        if rows < len(row_N) or (rows > len(row_N) and not is_fused):
            raise _of_another_model(name, tensor, channels=len(row_N))
        row_N = torch.cat([row_N.new_ones(rows - len(row_N)), row_N]).to(tensor)
        yield row_N if tensor.ndim == 1 else row_N[:, None]


def _of_another_model(name: str, tensor: Tensor, *, channels: int) -> EngineError:
    message = f"the profile's smoothing has {channels} channels for {name}, which is {list(tensor.shape)}"
    return EngineError(message, hint="the profile is of another model: make it again with `appliance profile`")


def require_all_folded(names: Iterable[str], *, smoothing: Smoothing) -> None:
    """Check that no group was folded in part. names: every parameter of a model that `fold` was given. Raises
    EngineError when a part of a group was not among them: its source and its layers would not belong together."""
    folded = {_key(part) for name in names for part in names_of_parts(name)}
    parts = [part for group in smoothing.groups for part in (group.source, *group.linears)]
    missing = [part for part in parts if _key(part) not in folded]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        message = f"the profile smooths {missing[0]}{more}, which this model does not have"
        raise EngineError(message, hint="the profile is of another model: make it again with `appliance profile`")


def power_of_two(scale_K: Tensor) -> Tensor:
    """Return the nearest power of two of each scale (in the exponent), within 2^±MAX_EXPONENT. scale_K: float, > 0."""
    exponent_K = scale_K.double().log2().round().clamp(-MAX_EXPONENT, MAX_EXPONENT)
    return torch.exp2(exponent_K).float()


def _key(name: str) -> str:
    return ONE_EXPERT.sub(GATE_UP, name)


@dataclass(frozen=True)
class Profile:
    origin: Origin
    scheme: Scheme
    settings: Settings
    smoothing: Smoothing
    layers: tuple[LayerError, ...] = ()
    """Layers of the engine with their errors; only a calibration has them."""
    not_smoothed: tuple[NotSmoothed, ...] = ()
    """Norms and linear layers that smoothing cannot divide, of a model whose family has no row in the list."""
    architecture: str = ""
    """Class of that model; empty for a listed family."""
    predicted: Predicted | None = None
    """Mismatch that is predicted; only a calibration has it."""
    predicted_all: Predicted | None = None
    """The same with no layer kept for the mismatch budget; None where it keeps none."""
    memory: Memory | None = None
    """Memory that the calibration took; only a calibration has it."""
    activations: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    """Largest |x| per input channel before smoothing, [K] float32, by a linear's name."""
    input_scales: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    """Input scales of a donor, by a parameter's name, as FlashRL has them: codes are round(w_nk * output_scale_n *
    input_scale_k)."""
    output_scales: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    """Output scales of a donor, by a parameter's name, as FlashRL has them."""

    @property
    def suggested_ignore(self) -> tuple[str, ...]:
        """The user's `ignore` and then the layers that the mismatch budget keeps in BF16, each once."""
        kept = (name for layer in self.layers if layer.stays_in_bf16 for name in layer.layer)
        return tuple(dict.fromkeys((*self.settings.ignore, *kept)))

    def header(self) -> dict[str, Any]:
        """Return the file's header: JSON types only."""
        return {
            "schema_version": SCHEMA_VERSION,
            **dataclasses.asdict(dataclasses.replace(self.origin, versions={})),
            "versions": dict(self.origin.versions),
            "scheme": str(self.scheme),
            "settings": dataclasses.asdict(self.settings),
            "smoothing": [_group_header(group) for group in self.smoothing.groups],
            "layers": [dataclasses.asdict(each) for each in self.layers],
            "not_smoothed": [dataclasses.asdict(each) for each in self.not_smoothed],
            "architecture": self.architecture,
            "suggested_ignore": list(self.suggested_ignore),
            "predicted": dataclasses.asdict(self.predicted) if self.predicted else None,
            "predicted_all": dataclasses.asdict(self.predicted_all) if self.predicted_all else None,
            "memory": dataclasses.asdict(self.memory) if self.memory else None,
        }


def _group_header(group: SmoothingGroup) -> dict[str, Any]:
    return {
        "source": group.source,
        "linears": list(group.linears),
        "head_dim": group.head_dim,
        "readers_of_head": group.readers_of_head,
    }


def write_profile(profile: Profile, *, folder: Path) -> Path:
    """Write `profile.safetensors` into the folder and return its path. The file appears whole or not at all."""
    kinds = {
        SMOOTHING: {group.source: group.scale_K for group in profile.smoothing.groups},
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
    """Load the smoothing of a profile. profile_dir: the folder, or the `profile.safetensors` in it. Raises EngineError
    when there is no profile, or it cannot be read."""
    header = read_file_header(profile_dir)
    file = profile_dir / PROFILE_FILE if profile_dir.is_dir() else profile_dir
    try:
        with safe_open(file, framework="pt") as profile:
            groups = [
                SmoothingGroup(
                    source=group["source"],
                    linears=tuple(group["linears"]),
                    scale_K=profile.get_tensor(SMOOTHING + group["source"]),
                    head_dim=group["head_dim"],
                    readers_of_head=group["readers_of_head"],
                )
                for group in header["smoothing"]
            ]
        return Smoothing(tuple(groups))
    except (SafetensorError, ValueError) as error:
        hint = "make one with `appliance profile`"
        raise EngineError(f"{file}: not a profile that can be read: {error}", hint=hint) from error

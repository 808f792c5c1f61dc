"""What a scheme is: how the rollout engine stores and multiplies weights. One row each; no torch, and
no pydantic: a trainer that sends weights (sync/manifest.py) need not have it.

A new scheme is a member and a row here, its codec (`quant/codec_<codec>.py`), its linear method with the proof of it
(a file in `engine/`) and one line in `engine/config.py`. Everything else reads the row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

BLOCK = 128  # rows and columns of a weight that share a scale where scales are of blocks
GROUPS = (128, 64, 32)  # columns of a row that share a scale where scales are of groups: the first that divides the row

_ADA, _BLACKWELL = (8, 9), (10, 0)  # compute capabilities


class Scheme(StrEnum):
    """bf16 is the unquantised reference; the rest quantise the linear layers of the rollout engine only."""

    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"
    FP8_CHANNEL = "fp8-channel"
    FP8_BLOCK = "fp8-block"

    @property
    def spec(self) -> SchemeSpec:
        return SPECS[self]

    @property
    def quantised(self) -> bool:
        return self is not Scheme.BF16


class Scales(StrEnum):
    """Elements of a weight [N, K] that share a scale."""

    TENSOR = "tensor"
    CHANNEL = "channel"  # a row: an output channel
    BLOCK = "block"  # BLOCK x BLOCK
    GROUP = "group"  # some columns of a row: see `group_size`


@dataclass(frozen=True)
class SchemeSpec:
    label: str
    """Description for people: what shares a scale, in weights and activations."""
    number: str
    """The kind of number, for messages: `INT8`."""
    bytes_per_weight: float
    """Bytes of a quantised weight in the engine, without its scales."""
    scales: Scales | None = None
    """Elements that share a scale; None: not quantised."""
    codec: str = ""
    """Name of the codec, which is in `quant/codec_<codec>.py`."""
    method: str = ""
    """Linear method of the engine, with its proof: a name of `engine/config.py`."""
    emulation: str = ""
    """Linear method that emulates the scheme in floating point where it has no kernels, for its numbers only; empty:
    none does."""
    experts: bool = True
    """Whether the method runs the experts of a mixture; otherwise they are emulated or refused."""
    trained_in: bool = False
    """Whether a trainer on a CPU can compute in the scheme, too: `trainer.forward: rollout`."""
    in_fp16: bool = True
    """Whether engines have the scheme in FP16, too: `trainer.dtype: fp16`."""
    takes_profile: bool = False
    """Whether a profile is made for the scheme: smoothing is worth something where a scale is of a channel."""
    even_steps: bool = False
    """Whether codes lie at equal distances, so that the rounding error is the same for small and large values."""
    finer: tuple[Scheme, ...] = ()
    """Schemes to which rollouts can be raised in a running engine and still be quantised, the next one first. They have
    the same `emulation`: a running engine can change to no other scheme."""
    vllm_name: str = ""
    """Name of a method of this kind in vLLM's own option, where it has one."""
    since: tuple[int, int] = (0, 0)
    """The first CUDA compute capability that multiplies such numbers."""
    until: tuple[int, int] | None = None
    """The first compute capability that vLLM has no kernels for (any more)."""
    fast_cpu_flags: tuple[str, ...] = ()
    """CPU features of which one is needed to be faster than BF16."""
    not_on_cpu: str = ""
    """Reason why no CPU runs the scheme; empty: one does. `{scheme}` stands for its name."""
    not_without_amx: str = ""
    """Reason why no processor without AMX runs the scheme, if that is another one."""
    not_on_gpu: str = ""
    """Reason why no GPU runs the scheme; empty: one does, from `since` on. `{scheme}` stands for its name."""

    @property
    def can_emulate(self) -> bool:
        return bool(self.emulation)


_FP8 = SchemeSpec(
    label="one scale per weight, activations per token",
    number="FP8",
    bytes_per_weight=1,
    scales=Scales.TENSOR,
    codec="fp8",
    method="vllm-fp8",
    emulation="emulated-fp8",
    experts=False,
    trained_in=True,
    in_fp16=False,
    finer=(Scheme.FP8_CHANNEL, Scheme.FP8_BLOCK),
    vllm_name="fp8",
    since=_ADA,
    not_on_cpu="on a CPU vLLM widens FP8 weights and multiplies in BF16 (W8A16), which is not `{scheme}`",
    not_without_amx=(
        "vLLM's FP8 kernels on a CPU need AMX, which this processor does not have, so `{scheme}` cannot run"
    ),
)

SPECS: dict[Scheme, SchemeSpec] = {
    Scheme.BF16: SchemeSpec(label="not quantised", number="BF16", bytes_per_weight=2),
    Scheme.INT8: SchemeSpec(
        label="W8A8: one scale per output channel, activations per token",
        number="INT8",
        bytes_per_weight=1,
        scales=Scales.CHANNEL,
        codec="int8",
        method="int8",
        trained_in=True,
        takes_profile=True,
        even_steps=True,
        # Nothing is finer: E4M3 has 3 bits of mantissa and rounds most weights more coarsely than 8 bits of their
        # row's range.
        until=_BLACKWELL,
        fast_cpu_flags=("amx_int8", "avx512_vnni", "avx_vnni"),  # they multiply INT8 four at a time
    ),
    Scheme.INT4: SchemeSpec(
        label="W4A16: one scale per 128 (64, 32) weights of an output channel, activations in BF16",
        number="INT4",
        bytes_per_weight=0.5,
        scales=Scales.GROUP,
        codec="int4",
        method="int4",
        trained_in=True,
        in_fp16=False,
        even_steps=True,
        fast_cpu_flags=("avx512f",),  # vLLM's library for others has not the kernel
        not_on_gpu="`{scheme}` runs on a CPU only: no weight update of it was ever proven on a GPU",
    ),
    Scheme.FP8: _FP8,
    Scheme.FP8_CHANNEL: replace(
        _FP8,
        label="one scale per output channel, activations per token",
        scales=Scales.CHANNEL,
        takes_profile=True,
        finer=(Scheme.FP8_BLOCK,),
    ),
    Scheme.FP8_BLOCK: replace(
        _FP8, label=f"{BLOCK}×{BLOCK} weights, 1×{BLOCK} activations", scales=Scales.BLOCK, finer=()
    ),
}


def group_size(length: int) -> int:
    """Return the number of columns that share a scale in a row of this length; 0 where none of GROUPS divides it."""
    return next((size for size in GROUPS if length % size == 0), 0)


def why_no_groups(rows: int, length: int) -> str:
    """Return why vLLM's kernels take no weight of this shape in groups, on one rank; or an empty text."""
    if rows % GROUPS[-1] == 0 and group_size(length):
        return ""
    least, groups = GROUPS[-1], ", ".join(map(str, GROUPS[:-1]))
    needs = f"output channels must be a multiple of {least} and input channels one of groups of {groups} or {least}"
    return f"{rows} x {length} on a rank, where {needs}"


def listed(names: Iterable[str]) -> str:
    """List names for messages, each in back quotes."""
    return ", ".join(f"`{name}`" for name in names)


def beside(value: float, *bounds: float, form: str = ".2g") -> str:
    """Format a value that is shown together with its bounds: with as many digits as it takes for the text to be on the
    same side of each bound as the value. form: the fewest digits, as of `format`, such as `.2g` or `.1e`."""
    digits, kind = int(form[1:-1]), form[-1]
    for more in range(17):
        text = f"{value:.{digits + more}{kind}}"
        if all(_side(float(text), bound) == _side(value, bound) for bound in bounds):
            return text
    return repr(value)


def _side(value: float, bound: float) -> tuple[bool, bool]:
    return value < bound, value > bound


PROFILED = tuple(scheme for scheme in Scheme if scheme.spec.takes_profile)


@dataclass(frozen=True)
class Precision:
    """Departure of an engine's precision from its own settings."""

    scheme: Scheme | None = None
    """Scheme of the quantised layers. None: the engine's own; BF16: no layer is quantised; else a finer scheme of the
    same kind."""
    bf16_layers: tuple[str, ...] = ()
    """Quantised layers that compute in BF16 as well, as `ignore` would name them."""

    @property
    def is_planned(self) -> bool:
        return self == AS_PLANNED

    @property
    def text(self) -> str:
        """Description for people: `as planned`, `bf16`, `with some layers in bf16`."""
        raised = "with some layers in bf16" if self.bf16_layers else ""
        return " ".join(filter(None, (str(self.scheme or ""), raised))) or "as planned"

    def to_json(self) -> str:
        return json.dumps(asdict(self))


AS_PLANNED = Precision()

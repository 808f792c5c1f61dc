"""Which device runs which scheme, and which one `auto` takes: by rule, or by what `bench` measured. The rules were read
in vendors' and vLLM's documents. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from appliance.terms.schemes import Scheme

CPU = "cpu"
AUTO = "auto"

PAYS_FROM = 1.05  # times BF16; below this a median ratio is within what such measurements scatter

USUAL_SEQUENCES_AT_ONCE = 256
_MANY_FROM_GIB = 70

_NOT_MEASURED = "by rule, not measured"
_SLOW_EXPERTS = "INT8 experts run one after the other and without CUDA graphs: correct, and not fast"


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    """CUDA compute capability (major, minor)."""
    product: str
    """Part of nvidia-smi's name of the GPU, in lower case."""
    memory_gib: int
    """Memory of the largest common GPU of that name, as nvidia-smi shows it; there are A100s with 40, too."""

    @property
    def has_fp8(self) -> bool:
        return self.capability >= Scheme.FP8.spec.since

    @property
    def is_blackwell(self) -> bool:
        return self.capability >= (10, 0)

    @property
    def sequences_at_once(self) -> int:
        """Most sequences in one engine: vLLM's own default; every A100 counts as a small one, as some have 40 GiB."""
        return 1024 if self.memory_gib >= _MANY_FROM_GIB and self.name != "a100" else USUAL_SEQUENCES_AT_ONCE


@dataclass(frozen=True)
class StoredResult:
    """Measurement by `bench` on a device, with the layer shapes and versions in question."""

    ratios: tuple[tuple[Scheme, float], ...]
    """Pairs of a quantised scheme and its tokens/s, as a multiple of BF16's."""
    measurement: str
    """Measurement that gave the ratios, in words."""

    def __str__(self) -> str:
        found = ", ".join(f"{scheme} {ratio:.2f} times bf16" for scheme, ratio in self.ratios)
        return f"measured: {found} ({self.measurement})"


# In the order of matching: `l40s` before `l40`.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", (8, 0), "a100", 80),
        Gpu("a10", (8, 6), "a10", 22),
        Gpu("a40", (8, 6), "a40", 45),
        Gpu("a6000", (8, 6), "rtx a6000", 47),
        Gpu("rtx3090", (8, 6), "rtx 3090", 24),
        Gpu("l40s", (8, 9), "l40s", 45),
        Gpu("l40", (8, 9), "l40", 45),
        Gpu("l4", (8, 9), "l4", 22),
        Gpu("rtx4090", (8, 9), "rtx 4090", 24),
        Gpu("h100", (9, 0), "h100", 80),
        Gpu("h200", (9, 0), "h200", 140),
        Gpu("h20", (9, 0), "h20", 95),
        Gpu("b200", (10, 0), "b200", 179),
        Gpu("b300", (10, 3), "b300", 268),
        Gpu("rtx5090", (12, 0), "rtx 5090", 32),
    )
}

DEVICES: tuple[str, ...] = (CPU, *GPUS)


def gpu_of_product(product: str) -> Gpu | None:
    """Return the GPU that nvidia-smi calls `product`, such as `NVIDIA A100-SXM4-80GB`. A GH200 is no H200, an A1000 no
    A10."""
    text = product.lower()
    return next((gpu for gpu in GPUS.values() if re.search(rf"(?<![a-z0-9]){gpu.product}(?![0-9])", text)), None)


def automatic_scheme(
    device: str, *, cpu_flags: frozenset[str], stored: StoredResult | None = None, experts: bool = False
) -> tuple[Scheme, str]:
    """Return (scheme, why) for `rollout.scheme: auto`. device: one of DEVICES. stored: the measurement, which decides
    on Ada and Hopper, where INT8 and FP8 both run; elsewhere the rule decides and the measurement is reported.
    experts: whether experts would be quantised."""
    scheme, why = _by_rule(device, cpu_flags=cpu_flags, experts=experts)
    if device == CPU or not GPUS[device].has_fp8 or GPUS[device].is_blackwell:
        if stored:
            return scheme, f"{why}; by rule, {stored}"
        return scheme, why if device == CPU else f"{why}; {_NOT_MEASURED}"
    able = [
        (ratio, each)
        for each, ratio in (stored.ratios if stored else ())
        if not why_not(each, device=device, cpu_flags=cpu_flags, experts=experts)
    ]
    if not able:
        return scheme, f"{why}; {_NOT_MEASURED}: `appliance bench` measures it"
    ratio, fastest = max(able, key=lambda each: each[0])
    if ratio < PAYS_FROM:
        return Scheme.BF16, f"quantising does not pay: {stored}"
    return fastest, f"the fastest, {stored}"


def _by_rule(device: str, *, cpu_flags: frozenset[str], experts: bool) -> tuple[Scheme, str]:
    int8 = Scheme.INT8.spec
    if device == CPU:
        found = [flag for flag in int8.fast_cpu_flags if flag in cpu_flags]
        if found:
            return Scheme.INT8, f"the processor has {found[0]}"
        return Scheme.BF16, f"the processor has none of {', '.join(int8.fast_cpu_flags)}"
    if experts:
        no_int8 = why_not(Scheme.INT8, device=device, cpu_flags=cpu_flags)
        return Scheme.BF16, f"{no_int8}, and {_no_experts(Scheme.FP8)}" if no_int8 else _SLOW_EXPERTS
    if GPUS[device].is_blackwell:
        return Scheme.FP8, f"{device} has FP8 tensor cores, and vLLM has no INT8 kernels for it"
    return Scheme.INT8, f"{device} has INT8 tensor cores" + ("" if GPUS[device].has_fp8 else " and none for FP8")


def why_not(scheme: Scheme, *, device: str, cpu_flags: frozenset[str], experts: bool = False) -> str:
    """Return why nothing runs the scheme on the device, or an empty text. device: one of DEVICES.  experts: whether the
    scheme quantises experts."""
    spec = scheme.spec
    if device == CPU:
        has_amx = any(flag.startswith("amx") for flag in cpu_flags)
        why = (spec.not_on_cpu if has_amx else spec.not_without_amx or spec.not_on_cpu).format(scheme=scheme)
    elif spec.not_on_gpu:
        why = spec.not_on_gpu.format(scheme=scheme)
    elif (has := GPUS[device].capability) < spec.since:
        needs = f"{spec.number} needs compute capability {spec.since[0]}.{spec.since[1]}"
        why = f"{needs}, {device} has {has[0]}.{has[1]}"
    else:
        why = why_outgrown(scheme, device=device)
    return why or (_no_experts(scheme) if experts else "")


def why_outgrown(scheme: Scheme, *, device: str) -> str:
    """Return why a GPU is too new for the scheme, whatever else is done; or an empty text. device: one of DEVICES."""
    gpu, until = GPUS.get(device), scheme.spec.until
    if gpu is None or until is None or gpu.capability < until:
        return ""
    return f"vLLM has no {scheme.spec.number} kernels for {device}{' (Blackwell)' if gpu.is_blackwell else ''}"


def _no_experts(scheme: Scheme) -> str:
    return "" if scheme.spec.experts else f"experts in {scheme.spec.number} run emulated only"


@dataclass(frozen=True)
class Topology:
    """How the GPUs of a training are shared out. Without a GPU, one CPU rank stands for one GPU."""

    nodes: int
    gpus_per_node: int
    tensor_parallel: int
    """GPUs that share one engine."""
    sequence_parallel: int
    """GPUs that share one sequence of the trainer."""

    @property
    def gpus(self) -> int:
        """Number of GPUs on all nodes; each has one rank of the trainer."""
        return self.nodes * self.gpus_per_node

    @property
    def engines(self) -> int:
        """Number of engines, at least 1: sizes that do not divide are refused before anybody counts engines."""
        return max(1, self.gpus // self.tensor_parallel)

    @property
    def data_parallel(self) -> int:
        """Number of ranks that share a mini-batch, at least 1: sizes that do not divide are refused."""
        return max(1, self.gpus // self.sequence_parallel)

    def rollout_rank(self, engine: int, *, rank: int) -> int:
        """Return the number of a rollout rank, counted over all engines. rank: within the engine."""
        return engine * self.tensor_parallel + rank

    def engine_of(self, rollout_rank: int) -> int:
        return rollout_rank // self.tensor_parallel

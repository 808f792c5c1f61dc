"""Which device runs which scheme. The rules were read in vendors' and vLLM's documents, not measured here."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.quant.scheme import Scheme

CPU = "cpu"
AUTO = "auto"

# CPU features that multiply int8 four at a time; without one of them INT8 is slower than BF16 on a CPU.
INT8_CPU_FLAGS = ("amx_int8", "avx512_vnni", "avx_vnni")


@dataclass(frozen=True)
class Gpu:
    """capability: CUDA compute capability (major, minor).  product: how nvidia-smi names it, lower case, in part."""

    name: str
    capability: tuple[int, int]
    product: str

    @property
    def is_blackwell(self) -> bool:
        return self.capability >= (10, 0)


# In the order of matching: `l40s` before `l40` before `l4`.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", (8, 0), "a100"),
        Gpu("a10", (8, 6), "a10"),
        Gpu("a40", (8, 6), "a40"),
        Gpu("a6000", (8, 6), "rtx a6000"),
        Gpu("rtx3090", (8, 6), "rtx 3090"),
        Gpu("l40s", (8, 9), "l40s"),
        Gpu("l40", (8, 9), "l40"),
        Gpu("l4", (8, 9), "l4"),
        Gpu("rtx4090", (8, 9), "rtx 4090"),
        Gpu("h100", (9, 0), "h100"),
        Gpu("h200", (9, 0), "h200"),
        Gpu("h20", (9, 0), "h20"),
        Gpu("b200", (10, 0), "b200"),
        Gpu("b300", (10, 3), "b300"),
        Gpu("rtx5090", (12, 0), "rtx 5090"),
    )
}

DEVICES: tuple[str, ...] = (CPU, *GPUS)


def gpu_of_product(product: str) -> Gpu | None:
    """The GPU that nvidia-smi calls `product`, such as `NVIDIA A100-SXM4-80GB`."""
    text = product.lower()
    return next((gpu for gpu in GPUS.values() if gpu.product in text), None)


def automatic_scheme(device: str, *, cpu_flags: frozenset[str]) -> tuple[Scheme, str]:
    """(scheme, why) for `rollout.scheme: auto`. device: one of DEVICES."""
    if device == CPU:
        found = [flag for flag in INT8_CPU_FLAGS if flag in cpu_flags]
        if found:
            return Scheme.INT8, f"the processor has {found[0]}"
        return Scheme.BF16, f"the processor has none of {', '.join(INT8_CPU_FLAGS)}"
    if GPUS[device].is_blackwell:
        return (
            Scheme.BF16,
            f"vLLM has no INT8 kernels for {device}; a rule, not measured",
        )
    return Scheme.INT8, f"{device} has INT8 tensor cores; a rule, not measured"


def why_not(scheme: Scheme, *, device: str, cpu_flags: frozenset[str]) -> str:
    """Why the device cannot run the scheme, or an empty text. device: one of DEVICES."""
    if scheme.is_fp8:
        return _why_not_fp8(scheme, device=device, cpu_flags=cpu_flags)
    if scheme is Scheme.INT8 and device != CPU and GPUS[device].is_blackwell:
        return f"vLLM has no INT8 kernels for {device} (Blackwell)"
    return ""


def _why_not_fp8(scheme: Scheme, *, device: str, cpu_flags: frozenset[str]) -> str:
    if device == CPU and not any(flag.startswith("amx") for flag in cpu_flags):
        return f"vLLM's FP8 kernels on a CPU need AMX, which this processor does not have, so `{scheme}` cannot run"
    if device == CPU:
        return f"on a CPU vLLM widens FP8 weights and multiplies in BF16, which is not `{scheme}`"
    if GPUS[device].capability < (8, 9):
        return f"FP8 needs compute capability 8.9, {device} has {'.'.join(map(str, GPUS[device].capability))}"
    return f"`{scheme}` is not available in this version"

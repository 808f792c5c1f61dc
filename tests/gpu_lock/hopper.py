"""A Hopper that is not there: vLLM's CUDA platform with capability 9.0, and in the kernels' place the same operations
in torch, registered for the CPU under the kernels' own names. For configurations, choices, and all around a kernel.

Legend: M tokens, N output channels, K input channels, H width of what is normed.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from ctypes import CDLL, RTLD_GLOBAL
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

MEMORY_BYTES = 80 << 30
FP8_MAX = 448.0


def load_without_driver(folder: Path) -> None:
    """Make and load a libcuda.so.1 whose every function fails, so that vLLM's compiled parts load. Needs a C compiler.

    folder: where the library and its source go.  Raises CalledProcessError where one of the tools fails.
    """
    import vllm

    package = Path(vllm.__file__).parent
    names = {name for library in package.rglob("*.so") for name in driver_functions(library)}
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text("".join(f"int {name}() {{ return 100; }}\n" for name in sorted(names)))
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
    CDLL(str(library), mode=RTLD_GLOBAL)


def driver_functions(library: Path) -> set[str]:
    """What a library asks of CUDA's driver: `cuInit`, and so on."""
    said = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1].partition("@")[0] for line in said.splitlines()}
    return {name for name in names if name.startswith("cu") and name[2:3].isupper()}


def take_its_place() -> None:
    """Before anything asks vLLM for its platform."""
    from vllm import platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Hopper(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return MEMORY_BYTES

        @classmethod
        def is_fully_connected(cls, ids: list[int]) -> bool:
            return True

        @classmethod
        def device_count(cls) -> int:
            return 8

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
            pass

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return False

    platforms._current_platform = Hopper()
    import vllm.config.vllm
    import vllm.triton_utils

    vllm.config.vllm.HAS_TRITON = True


def register_kernels() -> torch.library.Library:
    """vLLM's own operators get an implementation for the CPU; it goes when the library that is returned does."""
    library = torch.library.Library("_C", "IMPL")
    for operator, function in {
        "dynamic_scaled_int8_quant": "quantise_tokens_int8",
        "static_scaled_fp8_quant": "quantise_fp8",
        "dynamic_scaled_fp8_quant": "quantise_fp8_anew",
        "dynamic_per_token_scaled_fp8_quant": "quantise_tokens_fp8",
        "cutlass_scaled_mm": "scaled_mm",
        "fused_add_rms_norm": "add_norm",
        "silu_and_mul": "silu_and_mul",
        "rotary_embedding": "rotate",
    }.items():
        library.impl(operator, partial(call, function), "CPU")
    return library


def call(function: str, *args: object) -> None:
    """By name, so that a test can put another one in its place."""
    globals()[function](*args)


def quantise_tokens_int8(out_MK: Tensor, input_MK: Tensor, scale_M1: Tensor, azp: Tensor | None) -> None:
    from appliance.quant.codec_int8 import quantise_int8

    assert azp is None, "symmetric"
    quantised = quantise_int8(input_MK.reshape(-1, input_MK.shape[-1]))
    out_MK.copy_(quantised.codes_NK.view(out_MK.shape))
    scale_M1.copy_(quantised.scale)


def quantise_fp8(out_NK: Tensor, input_NK: Tensor, scale: Tensor, *_: object) -> None:
    """As csrc/quantization/fp8/common.cuh: the product with 1 / scale, cut at the largest number."""
    out_NK.copy_((input_NK.float() * scale.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(out_NK.dtype))


def quantise_fp8_anew(out_NK: Tensor, input_NK: Tensor, scale: Tensor) -> None:
    scale.copy_(input_NK.float().abs().max() / FP8_MAX)
    quantise_fp8(out_NK, input_NK, scale)


def quantise_tokens_fp8(out_MK: Tensor, input_MK: Tensor, scale_M1: Tensor, scale_ub: Tensor | None) -> None:
    """As common.cu: of tokens the quotient by a scale of at least 1 / (448 * 512)."""
    assert scale_ub is None, "no upper bound"
    x_MK, least = input_MK.float(), 1.0 / torch.tensor(FP8_MAX * 512)
    scale_M1.copy_((x_MK.abs().amax(dim=-1, keepdim=True) / FP8_MAX).maximum(least))
    out_MK.copy_((x_MK / scale_M1).clamp(-FP8_MAX, FP8_MAX).to(out_MK.dtype))


def scaled_mm(
    out_MN: Tensor, a_MK: Tensor, b_KN: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None
) -> None:
    """As CUTLASS: sums in a wide format, both scales, the bias, and one rounding at the end."""
    sums_MN = a_MK.double() @ b_KN.double()
    answer_MN = sums_MN * b_scale.double().view(1, -1) * a_scale.double().view(-1, 1)
    out_MN.copy_(answer_MN if bias is None else answer_MN + bias.double())


def normed(x_MH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """A token by itself, whatever the batch."""
    wide = x_MH.double()
    return ((wide * (wide.pow(2).mean(dim=-1, keepdim=True) + eps).rsqrt()).float() * weight_H.float()).to(x_MH.dtype)


def add_norm(input_MH: Tensor, residual_MH: Tensor, weight_H: Tensor | None, eps: float) -> None:
    """As layernorm_kernels.cu: both in place, the sum rounded before it is normed."""
    assert weight_H is not None
    residual_MH.add_(input_MH)
    input_MH.copy_(normed(residual_MH, weight_H, eps))


def silu_and_mul(out_MN: Tensor, input_M2N: Tensor) -> None:
    gate, up = input_M2N.chunk(2, dim=-1)
    out_MN.copy_(gate.double().mul(gate.double().sigmoid()).to(gate.dtype) * up)


def rotate(
    positions_M: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin: Tensor,
    is_neox: bool,
    first: int = 0,
    inverse: bool = False,
) -> None:
    """In place: halves of a head."""
    assert is_neox and not first and not inverse
    cos, sin = cos_sin[positions_M].chunk(2, dim=-1)
    for rows in (query, *(() if key is None else (key,))):
        heads = rows.view(len(positions_M), -1, head_size)
        x, y = (each.clone() for each in heads.chunk(2, dim=-1))
        heads.copy_(torch.cat([x * cos[:, None] - y * sin[:, None], y * cos[:, None] + x * sin[:, None]], dim=-1))


class Launch:
    """In the place of a Triton kernel: `kernel[grid](...)` calls the function."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._function


def norm_rows(input_MH: Tensor, weight_H: Tensor, output_MH: Tensor, *numbers: float, **_: object) -> None:
    """As batch_invariant.py's kernel: epsilon is the last of its numbers."""
    output_MH.copy_(normed(input_MH, weight_H, numbers[-1]))


def softmax_rows(input_MN: Tensor, output_MN: Tensor, *_: object, **__: object) -> None:
    output_MN.copy_(input_MN.double().log_softmax(dim=-1))


def matmul(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    return (a_MK.double() @ b_KN.double()).to(a_MK.dtype)


def attend(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: list[int],
    block_table: Tensor,
    fa_version: int,
    num_splits: int,
    **_: object,
) -> Tensor:
    """As FlashAttention with a cache in blocks: a row by itself, its last key at the place of its query.

    k, v: [blocks, tokens of a block, KV heads, D].
    """
    assert causal and window_size == [-1, -1] and (fa_version, num_splits) == (3, 1)
    starts = cu_seqlens_q.tolist()
    for start, end, length, blocks in zip(starts[:-1], starts[1:], seqused_k.tolist(), block_table, strict=True):
        keys, values = (each[blocks.long()].flatten(0, 1).double() for each in (k, v))
        group = q.shape[1] // k.shape[2]
        for row in range(start, end):
            seen = length - (end - row) + 1
            own = q[row].double().unflatten(0, (-1, group))
            weights = (torch.einsum("ghd,tgd->ght", own, keys[:seen]) * softmax_scale).softmax(dim=-1)
            out[row] = torch.einsum("ght,tgd->ghd", weights, values[:seen]).flatten(0, 1).to(out.dtype)
    return out

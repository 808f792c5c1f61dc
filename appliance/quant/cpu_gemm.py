"""The INT8 GEMMs of vLLM's CPU library, which loads in a process without vLLM: rollouts and training multiply with the
same kernel, chosen in the same way.

`sgl`: its packed kernel of AVX-512 VNNI. On a host without AMX it packs a weight several times faster than oneDNN
(whose reorder with compensation has no fast version there) and multiplies as fast, as long as 32 tokens and 32 rows of
codes fit the core's cache together; beyond that it reads everything again and again (docs/results/gemm.md). vLLM itself
takes it on hosts with AMX only. `onednn`: everything else, and every host with AMX, where oneDNN has the matrix unit.

Both quantise activations inside and make s = a / 127; oneDNN's path multiplies by 1 / s and gives the codec's codes;
sgl's multiplies by a 127 / a of its own rounding, so that a code may differ by one where x / s lies within 127 * 2^-23
of a half (x = a / 2 does), and takes a below 1e-7 as 1e-7. Either is within the codec's bound. For a probe
of integers with a = 127 both factors are exactly 1.

Legend: M tokens, N output channels, K input channels of this rank's part of the layer.
"""

from __future__ import annotations

import functools
import importlib.util
import platform
from pathlib import Path

import torch
from torch import Tensor

LONGEST_PACKED_ROW = 8192
_TILE = 32  # rows and columns: what sgl's kernel takes without a rest
_ONEDNN_CACHED_PRIMITIVES = 32  # as vLLM's kernel has it


@functools.cache
def load_kernels() -> None:
    """vLLM's library for this CPU, the one that vLLM itself would load: two of them in one process abort it."""
    if hasattr(torch.ops._C, "rotary_embedding"):
        return
    name = "_C"
    if platform.machine() == "x86_64" and not torch.cpu._is_avx512_bf16_supported():
        name = "_C_AVX512" if torch.cpu._is_avx512_supported() else "_C_AVX2"
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("vllm is not installed")
    torch.ops.load_library(Path(spec.submodule_search_locations[0]) / f"{name}.abi3.so")


class OneDnnGemm:
    """A weight, packed. scale_N1: the very memory that is multiplied with.

    The handle keeps the address of the scale tensor, and nothing else does: held here for as long as it lives.
    """

    name = "onednn"

    def __init__(self, codes_NK: Tensor, *, scale_N1: Tensor) -> None:
        """As `process_weights_for_onednn` of vLLM's kernel, without the sum of each row of codes. Only asymmetric
        activations need that; it makes a float32 copy of the codes and takes as long as all the rest of a sync's work
        on a large layer. Remove when: vLLM computes `azp_adj` for asymmetric activations only."""
        self.scale_N1 = scale_N1
        self._rows = len(codes_NK)
        handle = torch.ops._C.create_onednn_scaled_mm_handler(
            codes_NK.t(), scale_N1, torch.bfloat16, True, False, _ONEDNN_CACHED_PRIMITIVES
        )
        self._handle = torch.tensor(handle, dtype=torch.int64)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            torch.ops._C.release_dnnl_matmul_handler(self._handle.item())

    def __call__(self, x_MK: Tensor, bias_N: Tensor | None) -> Tensor:
        """[M, N] in the type of `x_MK`: quantised per token, multiplied, plus the bias in float32, rounded once."""
        codes_MK = torch.empty_like(x_MK, dtype=torch.int8)
        scale_M1 = torch.empty((len(x_MK), 1), dtype=torch.float32)
        torch.ops._C.dynamic_scaled_int8_quant(codes_MK, x_MK.contiguous(), scale_M1, None)
        y_MN = torch.empty((len(x_MK), self._rows), dtype=x_MK.dtype)
        torch.ops._C.onednn_scaled_mm(y_MN, codes_MK, scale_M1, None, None, bias_N, self._handle)
        return y_MN


class SglGemm:
    """As OneDnnGemm. Codes and scales are handed over at every call: no address outlives its memory."""

    name = "sgl"

    def __init__(self, codes_NK: Tensor, *, scale_N1: Tensor) -> None:
        self.scale_N1 = scale_N1
        self._packed = torch.ops._C.convert_weight_packed(codes_NK)

    def __call__(self, x_MK: Tensor, bias_N: Tensor | None) -> Tensor:
        bias_N = None if bias_N is None else bias_N.float()
        return torch.ops._C.int8_scaled_mm_with_quant(x_MK, self._packed, self.scale_N1, bias_N, x_MK.dtype, True)


def packs_quickly(rows: int, columns: int) -> bool:
    """Whether a weight of this shape gets sgl's kernel on this host."""
    return rows % _TILE == 0 and columns % _TILE == 0 and columns <= LONGEST_PACKED_ROW and has_packed_kernel()


@functools.cache
def has_packed_kernel() -> bool:
    """The kernel is compiled for AVX-512 with VNNI and BF16 and checks nothing. AMX is asked of the processor itself:
    `_is_amx_tile_supported` is patched in engines."""
    load_kernels()
    return (
        platform.machine() == "x86_64"
        and hasattr(torch.ops._C, "convert_weight_packed")
        and torch.cpu._is_vnni_supported()
        and torch.cpu._is_avx512_bf16_supported()
        and not torch.cpu.get_capabilities().get("amx_tile", False)
    )

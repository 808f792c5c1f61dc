"""The GEMMs that multiply INT8 codes on a CPU: two kernels of vLLM's, and which of them a layer gets.

`sgl`: vLLM's packed kernel of AVX-512 VNNI. On a host without AMX it packs a weight several times faster than oneDNN
(whose reorder with compensation has no fast version there) and multiplies as fast, as long as 32 tokens and 32 rows of
codes fit the core's cache together; beyond that it reads everything again and again (docs/results/gemm.md). vLLM itself
takes it on hosts with AMX only. `onednn`: everything else, and every host with AMX, where oneDNN has the matrix unit.

Activations are quantised per token inside either kernel. Both make s = a / 127; oneDNN's path multiplies by 1 / s and
gives the codec's codes; sgl's multiplies by 127 / a, rounded once instead of twice, so that a code may differ by one
where x / s lies within 127 * 2^-23 of a half (x = a / 2 does), and takes a below 1e-7 as 1e-7. Either is within the
codec's bound. For a probe of integers with a = 127 both factors are exactly 1.

Legend: M tokens, N output channels, K input channels of this rank's part of the layer.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.platforms import CpuArchEnum, current_platform

LONGEST_PACKED_ROW = 8192
_TILE = 32  # rows and columns: what sgl's kernel takes without a rest
_ONEDNN_CACHED_PRIMITIVES = 32  # as vLLM's kernel has it


class CpuGemm(Protocol):
    """A weight, packed. scale_N1: the very memory that is multiplied with.  name: for the attestation."""

    name: str
    scale_N1: Tensor

    def __call__(self, x_MK: Tensor, bias_N: Tensor | None) -> Tensor:
        """[M, N] in the type of `x_MK`: quantised per token, multiplied, plus the bias in float32, rounded once."""


class OneDnnGemm:
    """The handle keeps the address of the scale tensor, and nothing else does: held here for as long as it lives."""

    name = "onednn"

    def __init__(self, codes_NK: Tensor, *, scale_N1: Tensor) -> None:
        """As `process_weights_for_onednn` of vLLM's kernel, without the sum of each row of codes. Only asymmetric
        activations need that; it makes a float32 copy of the codes and takes as long as all the rest of a sync's work
        on a large layer. Remove when: vLLM computes `azp_adj` for asymmetric activations only."""
        self.scale_N1 = scale_N1
        self._handle = ops.create_onednn_scaled_mm(
            codes_NK.t(), scale_N1, torch.get_default_dtype(), True, False, _ONEDNN_CACHED_PRIMITIVES
        )

    def __call__(self, x_MK: Tensor, bias_N: Tensor | None) -> Tensor:
        codes_MK, scale_M1, _ = ops.onednn_scaled_int8_quant(x_MK, None, None, True)
        y_MN = torch.empty((len(x_MK), self._handle.n), dtype=x_MK.dtype)
        ops.onednn_scaled_mm(self._handle, codes_MK, y_MN, scale_M1, None, None, bias_N)
        return y_MN


class SglGemm:
    """Codes and scales lie in tensors that are handed over at every call: no address outlives its memory."""

    name = "sgl"

    def __init__(self, codes_NK: Tensor, *, scale_N1: Tensor) -> None:
        self.scale_N1 = scale_N1
        self._packed = torch.ops._C.convert_weight_packed(codes_NK)

    def __call__(self, x_MK: Tensor, bias_N: Tensor | None) -> Tensor:
        bias_N = None if bias_N is None else bias_N.float()
        return torch.ops._C.int8_scaled_mm_with_quant(x_MK, self._packed, self.scale_N1, bias_N, x_MK.dtype, True)


def pack(codes_NK: Tensor, *, scale_N1: Tensor) -> CpuGemm:
    """codes_NK: [N, K] int8, contiguous.  scale_N1: [N, 1] float32."""
    kind = SglGemm if packs_quickly(*codes_NK.shape) else OneDnnGemm
    return kind(codes_NK, scale_N1=scale_N1)


def packs_quickly(rows: int, columns: int) -> bool:
    """Whether a weight of this shape gets sgl's kernel on this host."""
    return rows % _TILE == 0 and columns % _TILE == 0 and columns <= LONGEST_PACKED_ROW and has_packed_kernel()


@functools.cache
def has_packed_kernel() -> bool:
    """The kernel is compiled for AVX-512 with VNNI and BF16 and checks nothing. AMX is asked of the processor itself:
    `_is_amx_tile_supported` is patched (cpu_patches.py)."""
    return (
        current_platform.get_cpu_architecture() == CpuArchEnum.X86
        and hasattr(torch.ops._C, "convert_weight_packed")
        and torch.cpu._is_vnni_supported()
        and torch.cpu._is_avx512_bf16_supported()
        and not torch.cpu.get_capabilities().get("amx_tile", False)
    )

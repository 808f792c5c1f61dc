"""What multiplies INT4 weights on a CPU: `cpu_gemm_wna16` of vLLM's library, which has it for hosts with AVX-512. On
others the same codes are widened to float64 at every call, slowly.

The kernel widens a part of the weight to BF16, bf16(q * s), as the codec does, and multiplies it in float32:

    y_mn = bf16(b_n + sum over k of x_mk bf16(q_nk s_ng))

in the order of k, one product after the other, so that a token's result depends on no other token and on no thread.
On a host with AMX vLLM itself has it multiply by tiles; here it never does (see the patch in engine/int8.py).

Its layout, of codes from 0 to 15 (q + 8): 16 output channels lie together. Of each input channel they have 8 bytes, the
lower half of a byte is the channel of even number. Codes and scales are handed over at every call: no address outlives
its memory.

Legend: M tokens, N output channels, K input channels of this rank's part of the layer, G groups of these.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import linear

from appliance.quant.codec import QuantisedWeight
from appliance.quant.codec_int4 import INT4_MIN, dequantise_int4, int4_groups
from appliance.quant.cpu_gemm import load_kernels

CHANNELS_TOGETHER = 16
_CODES_PER_WORD = 8  # of 32 bits


class Int4Gemm:
    """A weight, packed."""

    name = "cpu_gemm_wna16"

    def __init__(self, codes_NK: Tensor, *, scale_NG: Tensor) -> None:
        """codes_NK: int8 in [-8, 7].  scale_NG: float32, each a BF16 number."""
        self.packed = pack_int4(codes_NK)
        self.scale_GN = scale_NG.t().contiguous().to(torch.bfloat16)

    def __call__(self, x_MK: Tensor, bias_N: Tensor | None) -> Tensor:
        """[M, N] BF16. x_MK: BF16.  bias_N: BF16."""
        y_MN = x_MK.new_empty((len(x_MK), self.scale_GN.shape[1]))
        torch.ops._C.cpu_gemm_wna16(
            *(x_MK.contiguous(), self.packed, y_MN, self.scale_GN),
            *(None, *_no_order(), bias_N, _CODES_PER_WORD, "vec"),
        )
        return y_MN

    def unpacked(self) -> QuantisedWeight:
        """Read codes and scales back from the memory that the kernel reads."""
        return int4_groups(unpack_int4(self.packed), scale_NG=self.scale_GN.t().float().contiguous())


class WideInt4Gemm(Int4Gemm):
    """The same weight in the same memory, widened by the codec and multiplied by torch in float64: the batch may change
    the order of a sum, which there is far below what BF16 rounds off."""

    name = "float64"

    def __call__(self, x_MK: Tensor, bias_N: Tensor | None) -> Tensor:
        values_NK = dequantise_int4(self.unpacked()).double()
        bias_N = None if bias_N is None else bias_N.double()
        with torch.autocast("cpu", enabled=False):
            return linear(x_MK.double(), values_NK, bias_N).to(x_MK.dtype)


def packed_int4(quantised: QuantisedWeight) -> Int4Gemm | WideInt4Gemm:
    """Pack a weight for what multiplies on this host."""
    kind = Int4Gemm if has_int4_kernel() else WideInt4Gemm
    return kind(quantised.codes_NK, scale_NG=quantised.scale)


def pack_int4(codes_NK: Tensor) -> Tensor:
    """Pack codes into the kernel's layout, [N / 16, 2 K] int32. codes_NK: int8 in [-8, 7], N a multiple of 16."""
    rows, length = codes_NK.shape
    nibbles = (codes_NK - INT4_MIN).view(torch.uint8).view(-1, CHANNELS_TOGETHER // 2, 2, length)
    bytes_BCK = nibbles[:, :, 0] | (nibbles[:, :, 1] << 4)
    return bytes_BCK.transpose(1, 2).contiguous().view(torch.int32).view(rows // CHANNELS_TOGETHER, -1)


def unpack_int4(packed: Tensor) -> Tensor:
    """Unpack to [N, K] int8: the inverse of `pack_int4`."""
    blocks = len(packed)
    bytes_BCK = packed.view(torch.uint8).view(blocks, -1, CHANNELS_TOGETHER // 2).transpose(1, 2)
    nibbles = torch.stack([bytes_BCK & 0xF, bytes_BCK >> 4], dim=2)
    return nibbles.reshape(blocks * CHANNELS_TOGETHER, -1).view(torch.int8) + INT4_MIN


@functools.cache
def _no_order() -> tuple[None, ...]:
    """Return the argument for an order of input channels, which no weight of ours has.

    Remove when: vLLM before 0.31, whose kernel has this argument, is not served.
    """
    arguments = torch.ops._C.cpu_gemm_wna16.default._schema.arguments
    return (None,) if any(argument.name == "g_idx" for argument in arguments) else ()


@functools.cache
def has_int4_kernel() -> bool:
    """Tell whether vLLM's library for this CPU has the kernel: the one for AVX2 has not."""
    load_kernels()
    return hasattr(torch.ops._C, "cpu_gemm_wna16")

"""The reference codec: what an INT8 weight is. Every path that quantises (kernels, engine, proof) is held to it.

Legend: N output channels (rows of a weight), K input channels.

    a_n = max_k |w_nk|                      in float32
    s_n = a_n / 127                         float32, one true division
    r_n = 1 / s_n                           float32
    q_nk = clamp(round_half_even(w_nk * r_n), -127, 127)
    w'_nk = q_nk * s_n

The code -128 is never used, so the grid is symmetric. A zero row has s = 0 and codes 0. Where s is so small that r
overflows (|w| below about 4e-37), the clamp makes the largest codes +-127; bfloat16 weights of that size round to 0
in any use. Multiplying by the reciprocal is what vLLM's own row quantisers do (CPU), so codec and kernel agree bit for
bit; against the exact quotient a code moves by at most one, and only where w/s lies within 127 * 2^-23 of a half.

Bound: |w - w'| <= s * (1/2 + 127 * 2^-22), for s a normal float32 number and 127 s not above the largest one (only a
float32 weight an ulp or two below that can have w' infinite).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from appliance.errors import NumericsError

INT8_MAX = 127
_CHUNK_ELEMENTS = 1 << 24  # bounds the float32 intermediate to 64 MiB


@dataclass(frozen=True)
class Int8Weight:
    """codes_NK: int8 in [-127, 127].  scale_N1: float32, >= 0."""

    codes_NK: Tensor
    scale_N1: Tensor


def quantise_int8(weight_NK: Tensor) -> Int8Weight:
    """Symmetric INT8 per output channel.

    weight_NK: [N, K] bfloat16, float16 or float32.  Raises NumericsError when a value is not finite.
    Tensor parallel: rows are independent, so quantising a shard of rows gives the shard of the codes.
    """
    scale_N1 = int8_scale(weight_NK)
    codes_NK = torch.empty(weight_NK.shape, dtype=torch.int8, device=weight_NK.device)
    rows = max(1, _CHUNK_ELEMENTS // max(1, weight_NK.shape[1]))
    for start in range(0, weight_NK.shape[0], rows):
        part = slice(start, start + rows)
        codes_NK[part] = _codes(weight_NK[part], scale_N1=scale_N1[part])
    return Int8Weight(codes_NK=codes_NK, scale_N1=scale_N1)


def int8_scale(weight_NK: Tensor) -> Tensor:
    """[N, 1] float32, absmax / 127. Raises NumericsError when a value is not finite."""
    absmax_N1 = weight_NK.abs().amax(dim=1, keepdim=True).float()  # abs and max are exact in any float format
    if not bool(torch.isfinite(absmax_N1).all()):
        raise NumericsError("a weight to quantise has a value that is not finite")
    # A tensor divisor: dividing by a Python number may be lowered to a multiplication by its reciprocal.
    return absmax_N1 / torch.tensor(float(INT8_MAX), dtype=torch.float32, device=weight_NK.device)


def _codes(weight_NK: Tensor, *, scale_N1: Tensor) -> Tensor:
    reciprocal_N1 = torch.where(scale_N1 > 0, scale_N1.reciprocal(), torch.zeros_like(scale_N1))
    scaled_NK = torch.nan_to_num(weight_NK.float() * reciprocal_N1, nan=0.0)  # 0 * inf in a row of denormals
    return scaled_NK.round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)


def dequantise_int8(quantised: Int8Weight) -> Tensor:
    """[N, K] float32."""
    return quantised.codes_NK.float() * quantised.scale_N1

"""The reference codec of INT8: symmetric, one scale per row (an output channel of a weight, a token of an activation).

Legend: N rows (output channels; tokens), K input channels.

    a_n = max_k |w_nk|                      in float32, exact
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

Tensor parallel: a rank that has some of the columns gets the a_n of the whole row, and its codes are the shard of the
whole row's codes. Values above a given a_n saturate at +-127. Activations are not invariant: a rank of a row-parallel
layer sees a part of each token only and scales it by its own largest value, as vLLM's kernels do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from appliance.quant.codec import Codec, QuantisedWeight, chunk_rows, divide_absmax, require_finite, row_absmax
from appliance.terms.schemes import Scheme

INT8_MAX = 127


def quantise_int8(weight_NK: Tensor, *, scheme: Scheme = Scheme.INT8, absmax: Tensor | None = None) -> QuantisedWeight:
    """Quantise to symmetric INT8 per row. weight_NK: [N, K] bfloat16, float16 or float32.  absmax: [N, 1] float32,
    largest magnitudes of the whole rows, where the weight is a shard of them.  Raises NumericsError when a value is not
    finite."""
    own = int8_absmax(weight_NK)
    return _by_absmax(weight_NK, own if absmax is None else absmax)


def quantise_int8_tokens(tokens_MK: Tensor, *, scheme: Scheme = Scheme.INT8) -> QuantisedWeight:
    """Quantise the activations of M tokens, each by itself, as quantise_int8 would. Raises NumericsError."""
    return _by_absmax(tokens_MK, require_finite(row_absmax(tokens_MK), tensor_name="an activation"))


def _by_absmax(weight_NK: Tensor, absmax: Tensor) -> QuantisedWeight:
    scale_N1 = divide_absmax(absmax, steps=float(INT8_MAX))
    codes_NK = torch.empty(weight_NK.shape, dtype=torch.int8, device=weight_NK.device)
    rows = chunk_rows(weight_NK)
    for start in range(0, weight_NK.shape[0], rows):
        part = slice(start, start + rows)
        codes_NK[part] = _codes(weight_NK[part], scale_N1=scale_N1[part])
    return int8_rows(codes_NK, scale_N1=scale_N1)


def _codes(weight_NK: Tensor, *, scale_N1: Tensor) -> Tensor:
    reciprocal_N1 = torch.where(scale_N1 > 0, scale_N1.reciprocal(), torch.zeros_like(scale_N1))
    scaled_NK = (weight_NK.float() * reciprocal_N1).nan_to_num_(nan=0.0)  # 0 * inf in a row of denormals
    return scaled_NK.round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)


def int8_rows(codes_NK: Tensor, *, scale_N1: Tensor) -> QuantisedWeight:
    return QuantisedWeight(codes_NK, scale=scale_N1, block=(1, codes_NK.shape[1]), scheme=Scheme.INT8)


def int8_absmax(weight_NK: Tensor, *, scheme: Scheme = Scheme.INT8) -> Tensor:
    """Return the largest magnitudes of the rows, [N, 1] float32. Raises NumericsError when a value is not finite."""
    return require_finite(row_absmax(weight_NK), tensor_name="a weight")


def dequantise_int8(quantised: QuantisedWeight) -> Tensor:
    """Dequantise to [N, K] float32."""
    return quantised.codes_NK.float() * quantised.scale


def dequantise_rows(codes_NK: Tensor, scale_N1: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Dequantise as `dequantise_int8`, each value rounded once, a cache's worth at a time: in float32 a whole weight is
    large."""
    values_NK = torch.empty(codes_NK.shape, dtype=dtype, device=codes_NK.device)
    rows = chunk_rows(codes_NK)
    wide_RK = values_NK.new_empty((min(rows, len(codes_NK)), codes_NK.shape[1]), dtype=torch.float32)
    parts = (each.split(rows) for each in (codes_NK, scale_N1, values_NK))
    for codes_RK, scale_R1, into_RK in zip(*parts, strict=True):  # on a CPU a product of both types is far slower
        into_RK.copy_(wide_RK[: len(codes_RK)].copy_(codes_RK).mul_(scale_R1))
    return values_NK


CODEC = Codec(
    largest=INT8_MAX,
    values=Tensor.float,
    quantise=quantise_int8,
    weight_absmax=int8_absmax,
    quantise_tokens=quantise_int8_tokens,
    dequantise=dequantise_int8,
)

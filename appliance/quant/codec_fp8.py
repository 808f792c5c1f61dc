"""The reference codec of FP8: E4M3 without infinities (largest value 448), symmetric, in three granularities.

Legend: N rows (output channels of a weight; tokens of an activation), K input channels; a block shares one scale.

    scheme        block of a weight   its floor       block of an activation   its floor
    fp8           the whole weight    none            1 x K                    s >= 1 / (448 * 512)
    fp8-channel   1 x K               s >= 1/(448*512) 1 x K                   s >= 1 / (448 * 512)
    fp8-block     128 x 128           a >= 1e-4       1 x 128                  a >= 1e-10

    a = max |w| over the block              in float32, exact
    s = a / 448                             float32, one true division, then the floor
    x = w / s                               float32: a true division, or the product with r = 1 / s (float32)
    q = E4M3(clamp(x, -448, 448))           round to nearest, ties to even: torch's cast
    w' = q * s                              float32

These are vLLM's numbers: its online weight quantisers multiply by the reciprocal for `fp8` and for the blocks and
divide for `fp8-channel`; its activation quantisers divide. `fp8` has per-token activations because that is what vLLM's
per-tensor method uses where CUTLASS has FP8 kernels (compute capability 8.9 on); elsewhere it takes one scale for all
tokens of a batch, which would make a token's result depend on its neighbours. Blocks start at element 0, 0 of the
tensor and the last ones are ragged where a dimension is not a multiple of 128. Sources: vLLM 0.31
`quantization/online/fp8.py`, `utils/deep_gemm.py:per_block_cast_to_fp8`, `csrc/quantization/fp8/common.cu`,
`fp8_utils.py:per_token_group_quant_fp8`.

E4M3: values m * 2^e with 4 significant bits, e >= -6; below 2^-6 steps of 2^-9; the bits 0x7f are NaN and never made.
A block of zeros has codes 0, and s = 0 (`fp8`; vLLM has codes of 448 there, times 0 as good) or its floor. Where
r overflows (`fp8`, |w| below about 1e-36) the codes are +-448. Saturation: |x| is above 448 by rounding only (at most
448 * 2^-22), or where a given a is too small.

Bound: |w - w'| <= max(|w| / 16, s / 1024) * (1 + 2^-22) + |w| * 2^-22, for s >= 2^-117. Rounding to E4M3 costs half a
step: 2^-4 of |x| for a normal result, 2^-10 for one below 2^-6. r, x and q * s are rounded to float32: less than
4 * 2^-24 of |w| together; below s = 2^-117 (`fp8` only) q * s may be a denormal.

Tensor parallel: `absmax` of the whole tensor makes the codes of a shard the shard of the codes; for `fp8-block` a
shard must start at a multiple of 128. Activations are not invariant where a scale covers a token: a rank of a
row-parallel layer sees a part of each token only and scales it by its own largest value, as vLLM's kernels do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from appliance.quant.codec import (
    Codec,
    QuantisedWeight,
    block_absmax,
    chunk_rows,
    divide_absmax,
    require_finite,
    row_absmax,
)
from appliance.terms.schemes import BLOCK, Scales, Scheme

FP8_MAX = 448.0
FP8_DTYPE = torch.float8_e4m3fn
_ROW_FLOOR = 512.0  # s >= 1 / (448 * 512)
_BLOCK_FLOOR = 1e-4
_GROUP_FLOOR = 1e-10
_SMALLEST_PRECISE = 2.0**-117  # below it s or its reciprocal is rounded to fewer bits than float32 has


def fp8_absmax(weight_NK: Tensor, *, scheme: Scheme) -> Tensor:
    """Return the largest magnitudes, float32, in the shape of the weight's scale. Raises NumericsError when a value is
    not finite."""
    scales = scheme.spec.scales
    absmax = block_absmax(weight_NK, block=(BLOCK, BLOCK)) if scales is Scales.BLOCK else row_absmax(weight_NK)
    absmax = require_finite(absmax, tensor_name="a weight")
    return absmax.amax(dim=0, keepdim=True) if scales is Scales.TENSOR else absmax


def fp8_scale(absmax: Tensor, *, scheme: Scheme) -> Tensor:
    """Return the scale of a weight by the largest magnitudes of its blocks."""
    scales = scheme.spec.scales
    if scales is Scales.BLOCK:
        return divide_absmax(absmax.clamp_min(_BLOCK_FLOOR), steps=FP8_MAX)
    scale = divide_absmax(absmax, steps=FP8_MAX)
    return scale if scales is Scales.TENSOR else _with_row_floor(scale)


def _with_row_floor(scale: Tensor) -> Tensor:
    return scale.clamp_min(1.0 / torch.tensor(FP8_MAX * _ROW_FLOOR, dtype=torch.float32, device=scale.device))


def quantise_fp8(weight_NK: Tensor, *, scheme: Scheme, absmax: Tensor | None = None) -> QuantisedWeight:
    """Quantise a weight. weight_NK: [N, K] bfloat16, float16 or float32.  absmax: in the scale's shape, where the
    weight is a shard. Raises NumericsError when a value is not finite."""
    own = fp8_absmax(weight_NK, scheme=scheme)
    scale = fp8_scale(own if absmax is None else absmax, scheme=scheme)
    imprecise = (scale > 0) & (scale < _SMALLEST_PRECISE)
    saturates = absmax is not None or bool(imprecise.any())
    return quantise_fp8_by(weight_NK, scale=scale, scheme=scheme, saturates=saturates)


def quantise_fp8_by(weight_NK: Tensor, *, scale: Tensor, scheme: Scheme, saturates: bool = True) -> QuantisedWeight:
    """Quantise with scales that are known. weight_NK: finite.  saturates: whether |x| may be above 448 by more than
    rounding."""
    block = weight_block(scheme, shape=tuple(weight_NK.shape))
    divide = scheme.spec.scales is Scales.CHANNEL
    codes_NK = _codes(weight_NK, scale=scale, block=block, divide=divide, saturates=saturates)
    return QuantisedWeight(codes_NK=codes_NK, scale=scale, block=block, scheme=scheme)


def weight_block(scheme: Scheme, *, shape: tuple[int, int]) -> tuple[int, int]:
    """Return the (rows, columns) that share a scale."""
    _, columns = shape
    return {Scales.TENSOR: shape, Scales.CHANNEL: (1, columns), Scales.BLOCK: (BLOCK, BLOCK)}[scheme.spec.scales]


def reciprocals(scale: Tensor) -> Tensor:
    """Return what a weight is multiplied by: 0 where the scale is 0, as such a block has zeros only."""
    return torch.where(scale > 0, scale.reciprocal(), torch.zeros_like(scale))


def quantise_fp8_tokens(tokens_MK: Tensor, *, scheme: Scheme, finite: bool = True) -> QuantisedWeight:
    """Quantise the activations of M tokens, each by itself. finite: raise NumericsError when a value is not finite;
    otherwise that token (block) becomes NaN, as in a kernel."""
    in_blocks = scheme.spec.scales is Scales.BLOCK
    block = (1, BLOCK) if in_blocks else (1, tokens_MK.shape[1])
    absmax = block_absmax(tokens_MK, block=block) if in_blocks else row_absmax(tokens_MK)
    if finite:
        require_finite(absmax, tensor_name="an activation")
    if in_blocks:
        scale = divide_absmax(absmax.clamp_min(_GROUP_FLOOR), steps=FP8_MAX)
    else:
        scale = _with_row_floor(divide_absmax(absmax, steps=FP8_MAX))
    codes_MK = _codes(tokens_MK, scale=scale, block=block, divide=True)
    return QuantisedWeight(codes_NK=codes_MK, scale=scale, block=block, scheme=scheme)


def row_blocks(weight: QuantisedWeight) -> Iterator[QuantisedWeight]:
    """Split a weight into parts of whole blocks that fit a core's cache when they are widened."""
    rows = max(1, chunk_rows(weight.codes_NK) // BLOCK) * BLOCK
    one_scale = weight.block[0] >= len(weight.codes_NK)
    for start in range(0, len(weight.codes_NK), rows):
        codes_RK = weight.codes_NK[start : start + rows]
        first, end = start // weight.block[0], -(-(start + len(codes_RK)) // weight.block[0])
        scale = weight.scale if one_scale else weight.scale[first:end]
        yield QuantisedWeight(codes_RK, scale=scale, block=weight.block, scheme=weight.scheme)


def transposed(weight: QuantisedWeight) -> QuantisedWeight:
    """Transpose [N, K] to [K, N] with the same codes and scales. weight: of `fp8-block`, whose blocks are square."""
    return replace(weight, codes_NK=weight.codes_NK.t(), scale=weight.scale.t())


def dequantise_fp8(quantised: QuantisedWeight) -> Tensor:
    """Dequantise to [N, K] float32."""
    codes_NK, block = quantised.codes_NK, quantised.block
    scale = spread_scale(quantised.scale, block=(1, block[1]), shape=tuple(codes_NK.shape))  # columns only
    is_finite = bool(torch.isfinite(quantised.scale).all())
    values_NK = torch.empty(codes_NK.shape, dtype=torch.float32, device=codes_NK.device)
    rows = _rows_at_once(codes_NK, block=block)
    for start in range(0, len(codes_NK), rows):
        part = slice(start, start + rows)
        own = scale[part] if block[0] == 1 else scale[start // block[0]]
        widened_NK = widened_fp8(codes_NK[part]) if is_finite else codes_NK[part].float()
        torch.mul(widened_NK, own, out=values_NK[part])
    return values_NK


def widened_fp8(codes_NK: Tensor) -> Tensor:
    """Widen codes to float32, exactly, for all codes but NaN: several times faster than torch's cast on a CPU. The bits
    of a code, moved to the places of a BF16's, are q * 2^-120, denormals too: E4M3 has the exponent bias 7 in place of
    127."""
    bits_NK = codes_NK.view(torch.int8).to(torch.int16).bitwise_left_shift_(4).bitwise_and_(-0x7810)  # 0x87f0
    return bits_NK.view(torch.bfloat16).float().mul_(2.0**120)


def spread_scale(scale: Tensor, *, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Return the scale of each element, as far as broadcasting does not do it: rows and columns of 1 stay 1."""
    for dim in (0, 1):
        if scale.shape[dim] > 1 and block[dim] > 1:
            scale = scale.repeat_interleave(block[dim], dim=dim).narrow(dim, 0, shape[dim])
    return scale


def _codes(values_NK: Tensor, *, scale: Tensor, block: tuple[int, int], divide: bool, saturates: bool = True) -> Tensor:
    """Round to FP8 codes. saturates: False where |x| <= 448 (1 + 2^-22), which rounds to 448 (464 is the tie) whatever
    the cast does with larger ones."""
    factor = scale if divide else reciprocals(scale)
    overflows = not divide and bool(factor.isinf().any())
    factor = spread_scale(factor, block=(1, block[1]), shape=tuple(values_NK.shape))  # columns only
    codes_NK = torch.empty(values_NK.shape, dtype=FP8_DTYPE, device=values_NK.device)
    rows = _rows_at_once(values_NK, block=block)
    operation = torch.div if divide else torch.mul
    buffer_RK = torch.empty(
        (min(rows, len(values_NK)), values_NK.shape[1]), dtype=torch.float32, device=codes_NK.device
    )
    for start in range(0, len(values_NK), rows):
        part = slice(start, start + rows)
        own = factor[part] if block[0] == 1 else factor[start // block[0]]
        scaled_RK = operation(values_NK[part], own, out=buffer_RK[: len(values_NK[part])])
        if overflows:
            scaled_RK.nan_to_num_(nan=0.0)  # 0 * inf
        if saturates:
            scaled_RK.clamp_(-FP8_MAX, FP8_MAX)  # whether a cast saturates is not ours to rely on
        codes_NK[part] = scaled_RK
    return codes_NK


def _rows_at_once(values_NK: Tensor, *, block: tuple[int, int]) -> int:
    """Return the number of rows that the cache takes, never rows of two blocks."""
    rows = chunk_rows(values_NK)
    if block[0] in (1, len(values_NK)):
        return rows
    return min(block[0], 1 << (rows.bit_length() - 1))  # a power of two divides a block of 128 rows


CODEC = Codec(
    largest=FP8_MAX,
    values=widened_fp8,
    quantise=quantise_fp8,
    weight_absmax=fp8_absmax,
    quantise_tokens=quantise_fp8_tokens,
    dequantise=dequantise_fp8,
)

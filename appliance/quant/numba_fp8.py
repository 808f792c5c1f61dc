"""The FP8 codec for BF16 weights on a CPU, compiled by Numba: bit for bit `quant.codec_fp8`, several times as fast.

PyTorch makes a pass through memory and wakes its threads for every operation; here a weight is read once for its
largest magnitudes and once for its codes. Scales, and the factors that weights are multiplied by, are the codec's own.

x (float32, |x| <= 448) to E4M3, to nearest, ties to even, on the bits of |x|:

* |x| >= 2^-6: 20 bits of the mantissa go. Adding 0x7ffff and the lowest bit that stays rounds, a carry moves on into
  the exponent, and the exponent's bias of 127 becomes 7.
* |x| < 2^-6: |x| + 2^14 has steps of 2^-9, E4M3's there, so the addition rounds; the code is the number of steps.

Legend: N rows, K input channels; R rows and B columns of blocks.
"""

from __future__ import annotations

import functools

import numba
import numpy as np
import torch
from numpy import float32, uint16, uint32
from torch import Tensor

from appliance.quant.codec import QuantisedWeight, require_finite
from appliance.quant.codec_fp8 import fp8_scale, quantise_fp8, quantise_fp8_by, reciprocals, spread_scale, weight_block
from appliance.quant.numba_beside_vllm import let_vllm_pass_llvmlite
from appliance.quant.row_threads import for_parts_of_rows
from appliance.terms.schemes import BLOCK, Scales, Scheme

let_vllm_pass_llvmlite()

# The GIL is released, a division by zero gives what IEEE says. Numba widens integers: every result is narrowed again,
# or the loops would not be vectorised; a loop over a slice is, one over a range of columns is not.
_compiled = functools.partial(numba.njit, nogil=True, error_model="numpy")

_SIGN, _MAGNITUDE = uint32(0x80), uint32(0x7FFFFFFF)
_SMALLEST_NORMAL = uint32((127 - 6) << 23)  # 2^-6
_BIAS = uint32((127 - 7) << 3)
_STEPS, _STEPS_BITS = float32(2.0**14), uint32((127 + 14) << 23)


def quantise_fp8_numba(weight_NK: Tensor, *, scheme: Scheme, absmax: Tensor | None = None) -> QuantisedWeight:
    """Quantise as `quantise_fp8`, which takes what is not BF16 on a CPU. Raises NumericsError when a value is not
    finite."""
    if weight_NK.dtype is not torch.bfloat16 or weight_NK.device.type != "cpu":
        return quantise_fp8(weight_NK, scheme=scheme, absmax=absmax)
    bits_NK = weight_NK.contiguous().view(torch.uint16).numpy()
    own = require_finite(_absmax(bits_NK, scheme=scheme), tensor_name="a weight")
    return quantise_fp8_numba_by(
        weight_NK, scale=fp8_scale(own if absmax is None else absmax, scheme=scheme), scheme=scheme
    )


def quantise_fp8_numba_by(weight_NK: Tensor, *, scale: Tensor, scheme: Scheme) -> QuantisedWeight:
    """Quantise as `quantise_fp8_by`, with scales that are known. weight_NK: finite."""
    if weight_NK.dtype is not torch.bfloat16 or weight_NK.device.type != "cpu":
        return quantise_fp8_by(weight_NK, scale=scale, scheme=scheme)
    bits_NK = weight_NK.contiguous().view(torch.uint16).numpy()
    codes = torch.empty(weight_NK.shape, dtype=torch.uint8, device="cpu")
    codes_NK = codes.numpy()
    rows, columns = block = weight_block(scheme, shape=tuple(weight_NK.shape))
    if scheme.spec.scales is Scales.CHANNEL:
        scale_N1 = scale.contiguous().numpy()
        for_parts_of_rows(
            lambda part: _divided(bits_NK[part], scale_N1[part], codes_NK[part]), rows=len(bits_NK), multiple=BLOCK
        )
    else:
        factor = reciprocals(scale)
        if bool(factor.isinf().any()):  # 0 * inf has its own rule, and weights of this size no use
            return quantise_fp8_by(weight_NK, scale=scale, scheme=scheme)
        wide = spread_scale(factor, block=(1, columns), shape=bits_NK.shape).expand(-1, bits_NK.shape[1])
        factor_RK = wide.contiguous().numpy()

        def some(part: slice) -> None:
            own_RK = factor_RK[part.start // rows : -(-part.stop // rows)]
            _multiplied(bits_NK[part], own_RK, rows, codes_NK[part])

        for_parts_of_rows(some, rows=len(bits_NK), multiple=BLOCK)
    return QuantisedWeight(codes.view(torch.float8_e4m3fn), scale=scale, block=block, scheme=scheme)


def _absmax(bits_NK: np.ndarray, *, scheme: Scheme) -> Tensor:
    """Compute the largest magnitudes, float32 in the shape of the scheme's scale."""
    scales = scheme.spec.scales
    rows, columns = (BLOCK, BLOCK) if scales is Scales.BLOCK else (1, bits_NK.shape[1])
    most_RB = np.zeros((-(-bits_NK.shape[0] // rows), -(-bits_NK.shape[1] // columns)), dtype=uint16)

    def some(part: slice) -> None:
        _largest(bits_NK[part], rows, columns, most_RB[part.start // rows : -(-part.stop // rows)])

    for_parts_of_rows(some, rows=len(bits_NK), multiple=BLOCK)
    absmax = torch.from_numpy(most_RB).view(torch.bfloat16).float()
    return absmax.amax(dim=0, keepdim=True) if scales is Scales.TENSOR else absmax


@_compiled()
def _largest(bits_NK, rows, columns, most_RB):
    for n in range(bits_NK.shape[0]):
        for b in range(most_RB.shape[1]):
            most = most_RB[n // rows, b]
            some = bits_NK[n, b * columns : (b + 1) * columns]
            for k in range(some.shape[0]):
                magnitude = uint16(some[k] & uint16(0x7FFF))
                most = magnitude if magnitude > most else most
            most_RB[n // rows, b] = most


@_compiled()
def _divided(bits_NK, scale_N1, codes_NK):
    for n in range(bits_NK.shape[0]):
        row, codes, scale = bits_NK[n], codes_NK[n], scale_N1[n, 0]
        for k in range(row.shape[0]):
            codes[k] = _e4m3(float32(_widened(row[k]) / scale))


@_compiled()
def _multiplied(bits_NK, factor_RK, rows, codes_NK):
    for n in range(bits_NK.shape[0]):
        row, codes, factor = bits_NK[n], codes_NK[n], factor_RK[n // rows]
        for k in range(row.shape[0]):
            codes[k] = _e4m3(float32(_widened(row[k]) * factor[k]))


@_compiled(inline="always")
def _widened(bits):
    """Widen a BF16 to float32."""
    return uint32(uint32(bits) << uint32(16)).view(float32)


@_compiled(inline="always")
def _e4m3(x):
    """x: float32, no NaN. Values above 448 saturate."""
    bits = float32(x).view(uint32)
    magnitude = float32(min(uint32(bits & _MAGNITUDE).view(float32), float32(448)))
    size = magnitude.view(uint32)
    last = uint32(uint32(size >> uint32(20)) & uint32(1))
    normal = uint32(uint32(uint32(size + uint32(0x7FFFF) + last) >> uint32(20)) - _BIAS)
    denormal = uint32(float32(magnitude + _STEPS).view(uint32) - _STEPS_BITS)
    return np.uint8(uint32(uint32(bits >> uint32(24)) & _SIGN) | (denormal if size < _SMALLEST_NORMAL else normal))

"""The INT4 codec for BF16 weights on a CPU, compiled by Numba: bit for bit `quant.codec_int4`, several times as fast.
How such code is written: numba_fp8.py.

x (float32, |x| <= 8) to an integer, to nearest, ties to even: x + 1.5 * 2^23 has steps of 1, so the addition rounds,
and the lowest byte of its bits is the integer in two's complement.

Legend: N rows, K input channels, G groups of a row.
"""

from __future__ import annotations

import functools

import numba
import numpy as np
import torch
from numpy import float32, uint8, uint16, uint32
from torch import Tensor

from appliance.quant.codec import QuantisedWeight, require_finite
from appliance.quant.codec_int4 import INT4_MAX, INT4_MIN, divisor_of, int4_groups, int4_scale, quantise_int4
from appliance.quant.numba_beside_vllm import let_vllm_pass_llvmlite
from appliance.quant.row_threads import for_parts_of_rows
from appliance.terms.schemes import group_size

let_vllm_pass_llvmlite()

_compiled = functools.partial(numba.njit, nogil=True, error_model="numpy")
_ROUNDS = float32(1.5 * 2.0**23)
_LEAST, _MOST = float32(INT4_MIN), float32(INT4_MAX)


def quantise_int4_numba(weight_NK: Tensor) -> QuantisedWeight:
    """Quantise as `quantise_int4`, which takes what is not BF16. Raises NumericsError when a value is not finite,
    ValueError where no group divides K."""
    group = group_size(weight_NK.shape[1])
    if weight_NK.dtype is not torch.bfloat16 or not group:
        return quantise_int4(weight_NK)
    bits_NK = weight_NK.contiguous().view(torch.uint16).numpy()
    most_NG = np.empty((len(bits_NK), bits_NK.shape[1] // group), dtype=uint16)
    for_parts_of_rows(lambda part: _largest(bits_NK[part], group, most_NG[part]), rows=len(bits_NK), multiple=1)
    absmax_NG = require_finite(torch.from_numpy(most_NG).view(torch.bfloat16).float(), tensor_name="a weight")
    scale_NG = int4_scale(absmax_NG)
    divisor_NG, codes_NK = divisor_of(scale_NG).numpy(), torch.empty(weight_NK.shape, dtype=torch.int8, device="cpu")
    codes = codes_NK.numpy().view(uint8)
    for_parts_of_rows(
        lambda part: _divided(bits_NK[part], group, divisor_NG[part], codes[part]), rows=len(bits_NK), multiple=1
    )
    return int4_groups(codes_NK, scale_NG=scale_NG)


@_compiled()
def _largest(bits_NK, group, most_NG):
    for n in range(bits_NK.shape[0]):
        for g in range(most_NG.shape[1]):
            most, some = uint16(0), bits_NK[n, g * group : (g + 1) * group]
            for k in range(some.shape[0]):
                magnitude = uint16(some[k] & uint16(0x7FFF))
                most = magnitude if magnitude > most else most
            most_NG[n, g] = most


@_compiled()
def _divided(bits_NK, group, divisor_NG, codes_NK):
    for n in range(bits_NK.shape[0]):
        for g in range(divisor_NG.shape[1]):
            some, codes = bits_NK[n, g * group : (g + 1) * group], codes_NK[n, g * group : (g + 1) * group]
            divisor = divisor_NG[n, g]
            for k in range(some.shape[0]):
                weight = uint32(uint32(some[k]) << uint32(16)).view(float32)
                steps = float32(min(max(float32(weight / divisor), _LEAST), _MOST))
                codes[k] = uint8(float32(steps + _ROUNDS).view(uint32) & uint32(0xFF))

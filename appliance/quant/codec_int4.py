"""The reference codec of INT4: symmetric, one scale per row and group of input channels; activations stay as they are.

Legend: N rows (output channels), K input channels, G groups of a row. A group has 128 input channels, or 64 or 32 where
the larger ones do not divide K (`group_size` of `terms/schemes.py`).

    a_ng = max over the group of |w_nk|     in float32, exact
    s_ng = bf16(a_ng / 7.5)                 one true division in float32, rounded to BF16: what the kernel reads
    q_nk = clamp(round_half_even(w_nk / s_ng), -8, 7)
    w'_nk = bf16(q_nk * s_ng)               what the kernel multiplies with, after it has widened a code

The 16 codes from -8 to 7 are those of GPTQ and compressed-tensors for symmetric INT4, and so is the scale of 2a / 15:
it leaves half a step at either end of the range, so that the largest value is off by no more than any other. A group of
zeros has s = 0 and codes 0, and so has one that is so small that s rounds to 0 (|w| below about 3e-40).

Bound: |w - w'| <= 9/16 s, for s a normal BF16 number and 8 s not above the largest one. Rounding to a code costs 1/2.
s is rounded by 2^-8 of itself, so that |w / s| is at most 7.5 / (1 - 2^-8), which is clamped to 7: 0.03 more. w' is
rounded by 2^-8 of 8 s at most: 0.03 more.

Tensor parallel: a rank of a row-parallel layer has the groups of its own part of the row (engine/int4.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from appliance.errors import NumericsError
from appliance.quant.codec import (
    Codec,
    QuantisedWeight,
    all_finite,
    block_absmax,
    chunk_rows,
    divide_absmax,
    require_finite,
)
from appliance.terms.schemes import Scheme, group_size

INT4_MIN, INT4_MAX = -8, 7
_STEPS = 7.5


def quantise_int4(weight_NK: Tensor, *, scheme: Scheme = Scheme.INT4, absmax: Tensor | None = None) -> QuantisedWeight:
    """Quantise to symmetric INT4 per group. weight_NK: [N, K] bfloat16, float16 or float32, K a multiple of 32.
    absmax: [N, G] float32, largest magnitudes of the groups, where they are known.  Raises NumericsError when a value
    is not finite, ValueError for another K."""
    own_NG = int4_absmax(weight_NK)
    scale_NG = int4_scale(own_NG if absmax is None else absmax)
    codes_NK = torch.empty(weight_NK.shape, dtype=torch.int8, device=weight_NK.device)
    rows = chunk_rows(weight_NK)
    for start in range(0, len(weight_NK), rows):
        part = slice(start, start + rows)
        codes_NK[part] = _codes(weight_NK[part], scale_NG=scale_NG[part])
    return int4_groups(codes_NK, scale_NG=scale_NG)


def int4_scale(absmax_NG: Tensor) -> Tensor:
    """Return the scales, [N, G] float32, each a BF16 number."""
    return divide_absmax(absmax_NG, steps=_STEPS).to(torch.bfloat16).float()


def divisor_of(scale_NG: Tensor) -> Tensor:
    """Return the scales with 1 in place of 0: a weight with a scale of 0 rounds to 0."""
    return torch.where(scale_NG > 0, scale_NG, torch.ones_like(scale_NG))


def _codes(weight_NK: Tensor, *, scale_NG: Tensor) -> Tensor:
    group = weight_NK.shape[1] // scale_NG.shape[1]
    groups_NGC = weight_NK.float().reshape(len(weight_NK), -1, group)
    steps_NGC = groups_NGC / divisor_of(scale_NG)[:, :, None]
    return steps_NGC.round_().clamp_(INT4_MIN, INT4_MAX).to(torch.int8).view(weight_NK.shape)


def int4_groups(codes_NK: Tensor, *, scale_NG: Tensor) -> QuantisedWeight:
    group = codes_NK.shape[1] // scale_NG.shape[1]
    return QuantisedWeight(codes_NK, scale=scale_NG, block=(1, group), scheme=Scheme.INT4)


def int4_absmax(weight_NK: Tensor, *, scheme: Scheme = Scheme.INT4) -> Tensor:
    """Return the largest magnitudes of the groups, [N, G] float32. Raises NumericsError when a value is not finite,
    ValueError where no group divides K."""
    length = weight_NK.shape[1]
    group = group_size(length)
    if not group:
        raise ValueError(f"`{scheme}` has no group that divides {length} input channels")
    return require_finite(block_absmax(weight_NK, block=(1, group)), tensor_name="a weight")


def dequantise_int4(quantised: QuantisedWeight) -> Tensor:
    """Dequantise to [N, K] float32, each a BF16 number."""
    codes_NK, scale_NG = quantised.codes_NK, quantised.scale
    values_NK = torch.empty(codes_NK.shape, dtype=torch.float32, device=codes_NK.device)
    rows = chunk_rows(codes_NK)
    for start in range(0, len(codes_NK), rows):
        part = slice(start, start + rows)
        scale_RG1 = scale_NG[part, :, None]
        groups_RGC = codes_NK[part].float().view(*scale_RG1.shape[:2], -1)
        values_NK[part] = groups_RGC.mul_(scale_RG1).to(torch.bfloat16).view(-1, codes_NK.shape[1])
    return values_NK


def int4_tokens(tokens_MK: Tensor, *, scheme: Scheme = Scheme.INT4) -> QuantisedWeight:
    """Return the activations of M tokens, BF16, as they are: with a scale of 1 that is what a code is. Raises
    NumericsError when a value is not finite."""
    if not all_finite(tokens_MK):
        raise NumericsError("an activation to quantise has a value that is not finite")
    ones_M1 = torch.ones((len(tokens_MK), 1), dtype=torch.float32, device=tokens_MK.device)
    return QuantisedWeight(tokens_MK, scale=ones_M1, block=(1, tokens_MK.shape[1]), scheme=scheme)


CODEC = Codec(
    largest=INT4_MAX,
    values=Tensor.float,
    quantise=quantise_int4,
    weight_absmax=int4_absmax,
    quantise_tokens=int4_tokens,
    dequantise=dequantise_int4,
)

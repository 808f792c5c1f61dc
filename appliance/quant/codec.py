"""The reference codec: what a quantised weight and a quantised activation are, for every scheme.

Every path that quantises (kernels, engine, trainer, proof) is held to it. The numbers, bounds and special cases stand
in `codec_int8` and `codec_fp8`; here a scheme is a value.
"""

from __future__ import annotations

from torch import Tensor

from appliance.quant.codec_fp8 import Fp8Weight, dequantise_fp8, fp8_absmax, quantise_fp8, quantise_fp8_tokens
from appliance.quant.codec_int8 import INT8_MAX, Int8Weight, dequantise_int8, int8_scale, quantise_int8
from appliance.quant.codec_range import require_finite, row_absmax
from appliance.quant.scheme import Scheme

__all__ = [
    "INT8_MAX",
    "Fp8Weight",
    "Int8Weight",
    "QuantisedWeight",
    "dequantise",
    "dequantise_int8",
    "int8_scale",
    "quantise",
    "quantise_int8",
    "quantise_tokens",
    "weight_absmax",
]

QuantisedWeight = Int8Weight | Fp8Weight


def quantise(weight_NK: Tensor, *, scheme: Scheme, absmax: Tensor | None = None) -> QuantisedWeight:
    """weight_NK: [N, K] bfloat16, float16 or float32.  absmax: see `weight_absmax`, where the weight is a shard.

    Raises NumericsError when a value is not finite, ValueError for a scheme that does not quantise.
    """
    if scheme is Scheme.INT8:
        return quantise_int8(weight_NK, absmax_N1=absmax)
    return quantise_fp8(weight_NK, scheme=_fp8(scheme), absmax=absmax)


def weight_absmax(weight_NK: Tensor, *, scheme: Scheme) -> Tensor:
    """float32 in the shape of the scheme's scale: [N, 1] (int8, fp8-channel), [1, 1] (fp8) or one for each block.

    What a shard needs of the whole weight: its own rows of [N, 1], all of [1, 1], its own blocks.
    Raises NumericsError when a value is not finite.
    """
    if scheme is Scheme.INT8:
        return require_finite(row_absmax(weight_NK), what="a weight")
    return fp8_absmax(weight_NK, scheme=_fp8(scheme))


def quantise_tokens(tokens_MK: Tensor, *, scheme: Scheme) -> QuantisedWeight:
    """Activations, each token by itself. tokens_MK: [M, K]. Raises NumericsError when a value is not finite."""
    if scheme is Scheme.INT8:
        return quantise_int8(tokens_MK)
    return quantise_fp8_tokens(tokens_MK, scheme=_fp8(scheme))


def dequantise(quantised: QuantisedWeight) -> Tensor:
    """[N, K] float32."""
    return dequantise_int8(quantised) if isinstance(quantised, Int8Weight) else dequantise_fp8(quantised)


def _fp8(scheme: Scheme) -> Scheme:
    if not scheme.is_fp8:
        raise ValueError(f"`{scheme}` does not quantise")
    return scheme

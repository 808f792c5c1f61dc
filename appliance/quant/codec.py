"""The reference codec: what a quantised weight and a quantised activation are, for every scheme.

Every path that quantises (kernels, engine, trainer, proof) is held to it. The numbers, bounds and special cases stand
in `codec_<name>.py`, each with its `CODEC`, found by the name that the scheme's row has; here a scheme is a value.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from appliance.terms.schemes import Scheme


class QuantisedWeight(Protocol):
    """A weight, or the tokens of an activation: codes [N, K], scales, and (rows, columns) that share one."""

    @property
    def codes_NK(self) -> Tensor: ...
    @property
    def scale(self) -> Tensor: ...
    @property
    def block(self) -> tuple[int, int]: ...
    @property
    def scheme(self) -> Scheme: ...


@dataclass(frozen=True)
class Codec:
    """largest: magnitude of a code.  values: codes of any shape as float32, exact.  The others: the functions below."""

    largest: float
    values: Callable[[Tensor], Tensor]
    quantise: Callable[..., QuantisedWeight]
    weight_absmax: Callable[..., Tensor]
    quantise_tokens: Callable[..., QuantisedWeight]
    dequantise: Callable[..., Tensor]


@functools.cache
def codec_of(scheme: Scheme) -> Codec:
    """Raises ValueError for a scheme that does not quantise."""
    if not scheme.quantised:
        raise ValueError(f"`{scheme}` does not quantise")
    return importlib.import_module(f"appliance.quant.codec_{scheme.spec.codec}").CODEC


def quantise(weight_NK: Tensor, *, scheme: Scheme, absmax: Tensor | None = None) -> QuantisedWeight:
    """weight_NK: [N, K] bfloat16, float16 or float32.  absmax: see `weight_absmax`, where the weight is a shard.

    Raises NumericsError when a value is not finite, ValueError for a scheme that does not quantise.
    """
    return codec_of(scheme).quantise(weight_NK, scheme=scheme, absmax=absmax)


def weight_absmax(weight_NK: Tensor, *, scheme: Scheme) -> Tensor:
    """float32 in the shape of the scheme's scale: [N, 1] (of channels), [1, 1] (of the tensor) or one for each block.

    What a shard needs of the whole weight: its own rows of [N, 1], all of [1, 1], its own blocks.
    Raises NumericsError when a value is not finite.
    """
    return codec_of(scheme).weight_absmax(weight_NK, scheme=scheme)


def quantise_tokens(tokens_MK: Tensor, *, scheme: Scheme) -> QuantisedWeight:
    """Activations, each token by itself. tokens_MK: [M, K]. Raises NumericsError when a value is not finite."""
    return codec_of(scheme).quantise_tokens(tokens_MK, scheme=scheme)


def dequantise(quantised: QuantisedWeight) -> Tensor:
    """[N, K] float32."""
    return codec_of(quantised.scheme).dequantise(quantised)

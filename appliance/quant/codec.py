"""The reference codec: what a quantised weight and a quantised activation are, for every scheme.

Every path that quantises (kernels, engine, trainer, proof) is held to it. The numbers, bounds and special cases stand
in `codec_<name>.py`, each with its `CODEC`, found by the name that the scheme's row has; here a scheme is a value.

All take the largest magnitudes of rows, blocks or tensors, exact, in one pass through the cache: the bits of a float
without its sign, read as an integer, have the order of its magnitude, and those of infinity and NaN come last. Integers
are reduced several times faster than floats on a CPU, and no value that is not finite is lost.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from appliance.errors import NumericsError
from appliance.terms.schemes import Scheme

CHUNK_ELEMENTS = 1 << 18  # 1 MiB in float32: intermediates stay in a core's cache; measured flat from 2^17 to 2^20
_GPU_CHUNK_ELEMENTS = 1 << 24  # there it is the number of launches that counts; bounds the intermediate to 64 MiB
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True)
class QuantisedWeight:
    """A quantised weight, or the quantised tokens of an activation."""

    codes_NK: Tensor
    """Codes: int8 in [-127, 127], or float8_e4m3fn; bfloat16 for activations that a scheme leaves as they are."""
    scale: Tensor
    """Scales: float32, >= 0, one for each block: [1, 1], [N, 1] or [ceil(N/rows), ceil(K/128)]."""
    block: tuple[int, int]
    """Size (rows, columns) of the block that shares a scale."""
    scheme: Scheme


@dataclass(frozen=True)
class Codec:
    """Definition of a scheme's numbers. A function without a docstring is described at the function of the same name
    below."""

    largest: float
    """Largest magnitude of a code."""
    values: Callable[[Tensor], Tensor]
    """Function that gives codes of any shape as float32, exactly."""
    quantise: Callable[..., QuantisedWeight]
    weight_absmax: Callable[..., Tensor]
    quantise_tokens: Callable[..., QuantisedWeight]
    dequantise: Callable[..., Tensor]


@functools.cache
def codec_of(scheme: Scheme) -> Codec:
    """Find the codec of a scheme. Raises ValueError for a scheme that does not quantise."""
    if not scheme.quantised:
        raise ValueError(f"`{scheme}` does not quantise")
    return importlib.import_module(f"appliance.quant.codec_{scheme.spec.codec}").CODEC


def quantise(weight_NK: Tensor, *, scheme: Scheme, absmax: Tensor | None = None) -> QuantisedWeight:
    """Quantise a weight. weight_NK: [N, K] bfloat16, float16 or float32.  absmax: see `weight_absmax`, where the weight
    is a shard. Raises NumericsError when a value is not finite, ValueError for a scheme that does not quantise."""
    return codec_of(scheme).quantise(weight_NK, scheme=scheme, absmax=absmax)


def weight_absmax(weight_NK: Tensor, *, scheme: Scheme) -> Tensor:
    """Return the largest magnitudes of a weight, float32 in the shape of the scheme's scale: [N, 1] (of channels), [1,
    1] (of the tensor) or one for each block.

    What a shard needs of the whole weight: its own rows of [N, 1], all of [1, 1], its own blocks.
    Raises NumericsError when a value is not finite.
    """
    return codec_of(scheme).weight_absmax(weight_NK, scheme=scheme)


def quantise_tokens(tokens_MK: Tensor, *, scheme: Scheme) -> QuantisedWeight:
    """Quantise activations, each token by itself. tokens_MK: [M, K]. Raises NumericsError when a value is not
    finite."""
    return codec_of(scheme).quantise_tokens(tokens_MK, scheme=scheme)


def dequantise(quantised: QuantisedWeight) -> Tensor:
    """Dequantise to [N, K] float32."""
    return codec_of(quantised.scheme).dequantise(quantised)


def chunk_rows(values_MK: Tensor, *, chunks: int = 1) -> int:
    """Return the number of rows that are worked on at once. chunks: on a CPU, of each thread."""
    on_cpu = values_MK.device.type == "cpu"
    elements = chunks * CHUNK_ELEMENTS * torch.get_num_threads() if on_cpu else _GPU_CHUNK_ELEMENTS
    return max(1, elements // max(1, values_MK.shape[1]))


def row_absmax(values_MK: Tensor) -> Tensor:
    """Return the largest magnitude of each row, [M, 1] float32, not checked. values_MK: [M, K] bfloat16, float16 or
    float32, K > 0."""
    bits_MK = values_MK.view(_BITS[values_MK.dtype])
    most_M1 = torch.empty((len(bits_MK), 1), dtype=bits_MK.dtype, device=bits_MK.device)
    rows = chunk_rows(bits_MK)
    magnitudes_RK = bits_MK.new_empty((min(rows, len(bits_MK)), bits_MK.shape[1]))
    for start in range(0, len(bits_MK), rows):
        part_RK = bits_MK[start : start + rows]
        own_RK = torch.bitwise_and(part_RK, torch.iinfo(bits_MK.dtype).max, out=magnitudes_RK[: len(part_RK)])
        torch.amax(own_RK, dim=1, keepdim=True, out=most_M1[start : start + rows])
    return most_M1.view(values_MK.dtype).float()


def block_absmax(values_MK: Tensor, *, block: tuple[int, int]) -> Tensor:
    """Return the largest magnitude of each block, [ceil(M / rows), ceil(K / columns)] float32, not checked. Blocks
    start at 0, 0 and the last are ragged."""
    rows, columns = block
    if rows == 1:
        return _group_absmax(values_MK, columns=columns)
    bits_MK = values_MK.view(_BITS[values_MK.dtype])
    at_once = max(1, chunk_rows(bits_MK, chunks=4) // rows) * rows
    most: list[Tensor] = []
    for start in range(0, len(bits_MK), at_once):
        magnitudes_RK = bits_MK[start : start + at_once] & torch.iinfo(bits_MK.dtype).max
        whole = len(magnitudes_RK) // rows * rows
        most.append(magnitudes_RK[:whole].view(-1, rows, magnitudes_RK.shape[1]).amax(dim=1))
        most += [magnitudes_RK[whole:].amax(dim=0, keepdim=True)] if whole < len(magnitudes_RK) else []
    return _group_absmax(torch.cat(most).view(values_MK.dtype), columns=columns)


def _group_absmax(values_MK: Tensor, *, columns: int) -> Tensor:
    length = values_MK.shape[1]
    padded_MK = torch.nn.functional.pad(values_MK, (0, -length % columns))
    groups_GC = padded_MK.reshape(-1, columns)
    return row_absmax(groups_GC).view(len(values_MK), -1)


def all_finite(values: Tensor) -> bool:
    """Check whether all values are finite, in one pass without intermediates, at twice the speed of a search for the
    extremes: a sum loses neither NaN nor infinities. It may overflow, so only the extremes say that a value is not
    finite."""
    if values.numel() == 0 or math.isfinite(values.sum().item()):
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(values))).all())


def require_finite(absmax: Tensor, *, tensor_name: str) -> Tensor:
    """Return the same tensor. Raises NumericsError when a value is not finite; `what`: such as `a weight`."""
    if not bool(torch.isfinite(absmax).all()):
        raise NumericsError(f"{tensor_name} to quantise has a value that is not finite")
    return absmax


def divide_absmax(absmax: Tensor, *, steps: float) -> Tensor:
    """Return absmax / steps in float32, by one true division: dividing by a Python number may be lowered to multiplying
    by its reciprocal."""
    return absmax / torch.tensor(steps, dtype=torch.float32, device=absmax.device)

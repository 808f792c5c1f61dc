"""Scales of a KV cache in FP8 (E4M3): one for the keys and one for the values of each attention layer.

An engine keeps a key or a value x as the FP8 number nearest to x / s, and reads it as that number times s. The largest
FP8 number is M = 448; what is larger than M s is kept as M s. The scale follows from what the layer wrote for some
prompts, keys after their norm and rotary embedding:

    s = 1.05 * q / M, rounded up to a power of two;
    q: the 99.9th percentile over the prompts' tokens of a token's largest |x|

So values may be 5 % larger than those of the prompts, but for one token in a thousand, before one is cut. FP8 is a
floating-point format with the same relative precision over 15 binades, so that a scale that is larger by a factor of
up to two costs none; a power of two makes both the division and the product exact.

Legend: T tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

LARGEST = 448.0  # number of float8_e4m3fn
QUANTILE = 0.999
MARGIN = 1.05
_LEAST_EXPONENT = -100  # of a scale: its reciprocal is a float32, too
CALIBRATION_TOKENS = 1 << 14
"""Tokens of the prompts by which scales are measured, at most."""

Pairs = Mapping[str, tuple[float, float]]
"""A number for keys and one for values, by the name of the layer in vLLM: ranges, or scales."""


def usual_largest(largest_T: Tensor) -> float:
    """Return the 99.9th percentile. largest_T: each token's largest |x|, at least one token."""
    return float(torch.quantile(largest_T.double(), QUANTILE))


def widest(ranges: Sequence[Pairs]) -> Pairs:
    """Return the largest range of each layer over several ranks, each of which has a part of the heads, or engines."""
    return {name: (max(part[name][0] for part in ranges), max(part[name][1] for part in ranges)) for name in ranges[0]}


def scales_of(ranges: Pairs) -> Pairs:
    """Return the scales of ranges. Each is a power of two; a layer that wrote nothing but zeros has 1."""
    return {name: (_scale(keys), _scale(values)) for name, (keys, values) in ranges.items()}


def _scale(largest: float) -> float:
    if largest == 0:
        return 1.0
    fraction, exponent = math.frexp(MARGIN * largest / LARGEST)  # fraction * 2^exponent, 1/2 <= fraction < 1
    return math.ldexp(1.0, max(_LEAST_EXPONENT, exponent if fraction > 0.5 else exponent - 1))


def drift(ranges: Pairs, *, before: Pairs) -> float:
    """Return the largest relative change of a range since the update before; one that was 0 does not count."""
    pairs = [pair for name in ranges for pair in zip(ranges[name], before[name], strict=True)]
    return max((abs(largest / largest_before - 1) for largest, largest_before in pairs if largest_before), default=0.0)


def digest_of(scales: Pairs, *, sync: int) -> str:
    """Return a digest of the scales of one weight update, 32 hexadecimal digits. sync: number of the update."""
    rows = [[name, float(keys).hex(), float(values).hex()] for name, (keys, values) in sorted(scales.items())]
    return hashlib.blake2b(json.dumps([sync, rows]).encode(), digest_size=16).hexdigest()


def calibration_prompts(prompts: Sequence[list[int]]) -> list[list[int]]:
    """Return the first of the prompts that together have at most CALIBRATION_TOKENS tokens, one at least."""
    chosen, tokens = list(prompts[:1]), sum(map(len, prompts[:1]))
    for prompt in prompts[1:]:
        tokens += len(prompt)
        if tokens > CALIBRATION_TOKENS:
            break
        chosen.append(prompt)
    return chosen

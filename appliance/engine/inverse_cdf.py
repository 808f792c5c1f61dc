"""Drawing one word per row of logits, by one uniform number each.

The number u of a row is a function of the request's seed and of the token's position alone. The word is the first whose
cumulative probability exceeds u. So from equal logits a request gets equal words, whatever else is in the batch, on any
number of threads and engines, and after a preemption; nothing is counted, so nothing has to be wound back.

u: SplitMix64 (Steele, Lea and Flood 2014), whose state begins at the mixed seed and advances by the position, so that
neighbouring seeds and positions have unrelated numbers. u = (its upper 52 bits + 1/2) * 2^-52 is never 0 and never 1.

The cumulative probability, in one read of the row from memory and two from the cache: the largest logit m; the sums of
e^(x - m) over blocks of 256 words; then only the block in which u falls, word by word. Exponentials are float32, to
2^-23 (a polynomial, so that they are the same on every processor). A block is summed in float32 in 16 lanes of 16
additions, so that its relative error is at most 20 * 2^-24, whatever the vocabulary; blocks are summed in float64.

Legend: B rows, V words of the vocabulary.
"""

from __future__ import annotations

import functools

import numba
import numpy as np
import torch
from numpy import float32, float64, uint32, uint64
from numpy.typing import NDArray
from torch import Tensor

from appliance.quant.numba_beside_vllm import let_vllm_pass_llvmlite
from appliance.quant.row_threads import for_parts_of_rows

let_vllm_pass_llvmlite()

# The GIL is released. Numba widens: every float32 result is narrowed again, or the loops would not be vectorised.
_compiled = functools.partial(numba.njit, nogil=True, error_model="numpy")

_GOLDEN, _FIRST_FACTOR, _SECOND_FACTOR = (
    uint64(0x9E3779B97F4A7C15),
    uint64(0xBF58476D1CE4E5B9),
    uint64(0x94D049BB133111EB),
)
_LANES, _BLOCK = 16, 256
_LOGITS_OF_A_THREAD = 1 << 17  # fewer are done before another thread has woken

_LOWEST = float32(-87)  # e^-87 is the last that is a normal float32; below it a word has probability 0
_LOG2_E, _ROUND = float32(1.44269504), float32(1.5 * 2**23)
_LN2_HIGH, _LN2_LOW = float32(0.693145751953125), float32(1.42860677e-06)  # the first has 15 bits: n * it is exact


def uniform_numbers(seeds_B: NDArray[np.uint64], positions_B: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return one number per row, [B] float64 in (0, 1).  seeds_B: any 64 bits.  positions_B: of the token in its
    sequence."""
    bits_B = _mixed(_mixed(seeds_B) + (positions_B + uint64(1)) * _GOLDEN)
    return ((bits_B >> uint64(12)).astype(float64) + 0.5) * 2.0**-52


def draw_words(logits_BV: Tensor, uniform_B: NDArray[np.float64]) -> Tensor:
    """Draw one word per row, [B] int64.

    logits_BV: float32 on a CPU, after temperature; -inf where a word may not be drawn.  uniform_B: in [0, 1).
    A row with a NaN or +inf, or with -inf alone, gives word 0, as vLLM's own sampler does: its log-probs are NaN, and
    who reads them refuses it.
    """
    words_B = torch.empty(len(logits_BV), dtype=torch.int64)
    logits, words = logits_BV.contiguous().numpy(), words_B.numpy()

    def draw_part(part: slice) -> None:
        _draw_rows(logits[part], uniform_B[part], words[part])

    rows, vocabulary = logits_BV.shape
    for_parts_of_rows(draw_part, rows=rows, multiple=max(1, _LOGITS_OF_A_THREAD // vocabulary))
    return words_B


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64's output function: a bijection of 64 bits."""
    bits = (bits ^ (bits >> uint64(30))) * _FIRST_FACTOR
    bits = (bits ^ (bits >> uint64(27))) * _SECOND_FACTOR
    return bits ^ (bits >> uint64(31))


@_compiled()
def _draw_rows(logits_BV, uniform_B, words_B):
    sums = np.empty((logits_BV.shape[1] + _BLOCK - 1) // _BLOCK, float64)
    for b in range(logits_BV.shape[0]):
        row = logits_BV[b]
        largest = _largest(row)
        total = _block_sums(row, largest, sums)
        words_B[b] = _word_at(row, largest, sums, uniform_B[b] * total) if np.isfinite(total) else 0


@_compiled()
def _largest(row):
    """Find the largest logit. A NaN is passed over here, and seen in the sums."""
    lanes = np.empty(_LANES, float32)
    for lane in range(_LANES):
        lanes[lane] = -np.inf
    whole = row.shape[0] // _LANES * _LANES
    for start in range(0, whole, _LANES):
        some = row[start : start + _LANES]
        for lane in range(_LANES):
            lanes[lane] = some[lane] if some[lane] > lanes[lane] else lanes[lane]
    largest = lanes[0]
    for lane in range(1, _LANES):
        largest = lanes[lane] if lanes[lane] > largest else largest
    for v in range(whole, row.shape[0]):
        largest = row[v] if row[v] > largest else largest
    return largest


@_compiled()
def _block_sums(row, largest, sums):
    """Fill `sums`; returns the total, which is NaN where the row has a value that is NaN or +inf, or -inf alone."""
    lanes = np.empty(_LANES, float32)
    total = float64(0)
    for k in range(sums.shape[0]):
        block = row[k * _BLOCK : (k + 1) * _BLOCK]
        for lane in range(_LANES):
            lanes[lane] = 0
        whole = block.shape[0] // _LANES * _LANES
        for start in range(0, whole, _LANES):
            some = block[start : start + _LANES]
            for lane in range(_LANES):
                lanes[lane] += _exponential(float32(some[lane] - largest))
        block_sum = float64(0)
        for lane in range(_LANES):
            block_sum += lanes[lane]
        for v in range(whole, block.shape[0]):
            block_sum += _exponential(float32(block[v] - largest))
        sums[k] = block_sum
        total += block_sum
    return total


@_compiled()
def _word_at(row, largest, sums, threshold):
    """Return the first word whose cumulative sum exceeds the threshold; where rounding leaves none, the last word with
    a probability."""
    before = float64(0)
    k = 0
    while k < sums.shape[0] - 1 and before + sums[k] <= threshold:
        before += sums[k]
        k += 1
    while sums[k] == 0:  # only where the threshold was rounded to the total
        k -= 1
        before = -np.inf
    word = 0
    for v in range(k * _BLOCK, min((k + 1) * _BLOCK, row.shape[0])):
        weight = _exponential(float32(row[v] - largest))
        before += weight
        word = v if weight > 0 else word
        if before > threshold:
            break
    return word


@_compiled(inline="always")
def _exponential(x):
    """Compute e^x for x <= 0 in float32, 0 below -87; NaN for NaN. e^x = 2^n e^r with |r| <= ln(2) / 2."""
    clamped = _LOWEST if x < _LOWEST else x
    shifted = float32(float32(clamped * _LOG2_E) + _ROUND)  # its last bits are the integer n
    n = float32(shifted - _ROUND)
    r = float32(float32(clamped - float32(n * _LN2_HIGH)) - float32(n * _LN2_LOW))
    tail = float32(1 / 5040)
    for factor in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):  # Taylor's series: the next term is below 2^-27
        tail = float32(float32(tail * r) + float32(factor))
    power = uint32(uint32(shifted.view(uint32) + uint32(127)) << uint32(23)).view(float32)
    return float32(0) if x < _LOWEST else float32(tail * power)

"""One uniform number per row, through the inverse of the cumulative distribution.

References are float64. A cumulative probability of the kernel is off by at most TOLERANCE: exponentials by 2^-23, a
block's sum by 20 * 2^-24 more, and the total by as much again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from appliance.engine.inverse_cdf import _exponential, draw_words, uniform_numbers

VOCABULARIES = (49_152, 152_064)
TOLERANCE = 2 * (2.0**-23 + 20 * 2.0**-24)
FAR_DEVIATIONS = 4.75  # of a normal number: one in a million; the numbers of the tests are the same each time


def numbers(count: int, *, seed: int = 1) -> np.ndarray:
    """As one request with this seed would have them."""
    return uniform_numbers(np.full(count, seed, np.uint64), np.arange(count, dtype=np.uint64))


def sharp(vocabulary: int, *, seed: int) -> Tensor:
    """[V] float32 as a language model's: most of the mass in some hundred words, the rest spread over all."""
    return 3 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed))


def assert_drawn_by(uniform_B: np.ndarray, words_B: Tensor, *, logits_BV: Tensor) -> None:
    """Each word's part of the unit interval has the row's number in it, or ends within the tolerance of it."""
    weights_BV = torch.exp(logits_BV.double() - logits_BV.double().amax(dim=1, keepdim=True))
    cumulative_BV = (weights_BV.cumsum(dim=1) / weights_BV.sum(dim=1, keepdim=True)).numpy()
    rows, words = np.arange(len(words_B)), words_B.numpy()
    assert (weights_BV[rows, words] > 0).all()
    upper_B = cumulative_BV[rows, words]
    lower_B = np.where(words > 0, cumulative_BV[rows, words - 1], 0.0)
    assert (lower_B - TOLERANCE <= uniform_B).all() and (uniform_B <= upper_B + TOLERANCE).all()


def assert_chi_square(observed: np.ndarray, expected: np.ndarray) -> None:
    """By Wilson and Hilferty: the cube root of chi-square by its degrees of freedom is nearly normal."""
    assert expected.min() > 5
    freedom = len(expected) - 1
    statistic = ((observed - expected) ** 2 / expected).sum()
    deviations = ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / (2 / (9 * freedom)) ** 0.5
    assert abs(deviations) < FAR_DEVIATIONS, statistic


def test_exponentials_are_within_an_ulp() -> None:
    @numba.njit
    def fill(x_N, out_N):
        for n in range(x_N.shape[0]):
            out_N[n] = _exponential(x_N[n])

    x_N = np.concatenate([-np.linspace(0, 87, 1_000_001), [-87.001, -1e9, -np.inf, np.nan]]).astype(np.float32)
    out_N = np.empty_like(x_N)
    fill(x_N, out_N)
    exact_N = np.exp(x_N[:-4].astype(np.float64))
    assert out_N[0] == 1
    assert np.abs(out_N[:-4] / exact_N - 1).max() <= 2.0**-23
    assert list(out_N[-4:-1]) == [0, 0, 0] and np.isnan(out_N[-1])


@pytest.mark.parametrize("vocabulary", [1, 2, 15, 16, 17, 255, 256, 257, 259, 5_000, *VOCABULARIES])
def test_the_word_is_where_the_number_falls(vocabulary: int) -> None:
    logits_BV = torch.stack([sharp(vocabulary, seed=seed) for seed in range(24)])
    uniform_B = numbers(24)
    assert_drawn_by(uniform_B, draw_words(logits_BV, uniform_B), logits_BV=logits_BV)


def cut_by_top_p(logits_V: Tensor, top_p: float) -> Tensor:
    """As vLLM defines it, in float64: the most likely words whose predecessors have less than top_p together."""
    probability_V, order_V = torch.softmax(logits_V.double(), dim=0).sort(descending=True, stable=True)
    predecessors_V = probability_V.cumsum(dim=0) - probability_V
    return logits_V.index_fill(0, order_V[predecessors_V >= top_p], -torch.inf)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (1.4, 1.0), (0.9, 0.95)])
def test_draws_have_the_distribution_of_the_logits(vocabulary: int, temperature: float, top_p: float) -> None:
    """Words in bins by their residue, so that an error within a block, or among lanes, is not averaged away."""
    logits_V = cut_by_top_p(sharp(vocabulary, seed=3) / temperature, top_p)
    probability_V = torch.softmax(logits_V.double(), dim=0).numpy()
    assert (probability_V > 0).mean() > 0.99 if top_p == 1 else 300 < (probability_V > 0).sum() < vocabulary / 2
    logits_BV = logits_V.expand(512, -1).contiguous()
    uniform_N = numbers(8 * 512, seed=11)
    words_N = np.concatenate([draw_words(logits_BV, some_B).numpy() for some_B in uniform_N.reshape(8, 512)])
    assert (probability_V[words_N] > 0).all()
    for bins in (61, 64):
        observed = np.bincount(words_N % bins, minlength=bins)
        assert_chi_square(observed, len(words_N) * np.bincount(np.arange(vocabulary) % bins, weights=probability_V))


def test_it_needs_no_compiler(tmp_path: Path) -> None:
    """Not on the path, not by its variables, and nothing kept from an earlier start."""
    code = "import numpy, torch; from appliance.engine.inverse_cdf import draw_words; "
    code += "print(draw_words(torch.tensor([[0.0, 1.0]]), numpy.array([0.9])).tolist())"
    known = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
    environ = known | {"PATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path)}
    child = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert child.stdout == "[1]\n"


def test_the_common_word_is_as_common_as_it_should_be() -> None:
    """Several per cent in each bin: words by word, at a small vocabulary."""
    logits_V = torch.tensor([0.0, 1.0, -1.0, 0.5, -torch.inf, 0.2, -2.0])
    probability_V = torch.softmax(logits_V.double(), dim=0).numpy()
    words_N = draw_words(logits_V.expand(60_000, -1), numbers(60_000, seed=5)).numpy()
    observed = np.bincount(words_N, minlength=7)
    assert observed[4] == 0
    assert_chi_square(observed[probability_V > 0], 60_000 * probability_V[probability_V > 0])


def test_what_is_beside_a_row_changes_nothing() -> None:
    logits_BV = torch.stack([sharp(1_000, seed=seed) for seed in range(300)])
    uniform_B = numbers(300)
    words_B = draw_words(logits_BV, uniform_B)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    assert torch.equal(draw_words(logits_BV[order], uniform_B[order.numpy()]), words_B[order])
    assert torch.equal(draw_words(logits_BV[7:9], uniform_B[7:9]), words_B[7:9])
    strided_BV = torch.cat([logits_BV, logits_BV], dim=1)[:, :1_000]
    assert torch.equal(draw_words(strided_BV, uniform_B), words_B)


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_change_nothing(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits_BV = torch.stack([sharp(49_152, seed=seed) for seed in range(20)])
    uniform_B, words = numbers(20), []
    for count in (1, threads):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        words.append(draw_words(logits_BV, uniform_B))
    assert torch.equal(*words)


LARGEST_NUMBER = 1 - 2.0**-53


@pytest.mark.parametrize("masked", [(0, 40), (600, 1_000), (256, 512), (0, 999), (1, 1_000)])
@pytest.mark.parametrize("number", [0.0, 2.0**-53, 0.5, LARGEST_NUMBER])
def test_a_masked_word_is_never_drawn(masked: tuple[int, int], number: float) -> None:
    logits_V = sharp(1_000, seed=2)
    logits_V[slice(*masked)] = -torch.inf
    (word,) = draw_words(logits_V[None], np.array([number])).tolist()
    possible = torch.isfinite(logits_V).nonzero().flatten().tolist()
    assert word in possible
    assert number > 0 or word == possible[0]
    assert number < LARGEST_NUMBER or word == possible[-1]


def test_a_threshold_that_is_rounded_to_the_total_draws_the_last_word() -> None:
    logits_V = torch.zeros(600)
    logits_V[300:] = -torch.inf
    assert draw_words(logits_V[None], np.array([1.0])).tolist() == [299]


@pytest.mark.parametrize("place", [0, 5, 700, 1_000])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_gives_what_vllm_gives(bad: float, place: int) -> None:
    """vLLM's own takes the argmax of probabilities that are all NaN. The rows beside it are drawn as ever."""
    logits_BV = torch.stack([sharp(1_001, seed=seed) for seed in range(3)])
    uniform_B = numbers(3)
    words_B = draw_words(logits_BV, uniform_B)
    logits_BV[1, place] = bad
    assert logits_BV[1].softmax(dim=0).argmax() == 0
    assert draw_words(logits_BV, uniform_B).tolist() == [words_B[0], 0, words_B[2]]


def test_a_row_without_a_word_gives_the_first() -> None:
    assert draw_words(torch.full((1, 300), -torch.inf), np.array([0.7])).tolist() == [0]


def test_numbers_are_strictly_between_0_and_1() -> None:
    every = np.array([0, 1, 2**62 - 1, 2**63, 2**64 - 1], np.uint64)
    seeds, positions = (grid.ravel() for grid in np.meshgrid(every, every[:3]))
    uniform_N = uniform_numbers(seeds, positions)
    assert len(set(uniform_N)) == len(uniform_N)
    assert (uniform_N > 0).all() and (uniform_N < 1).all()


def test_seeds_far_apart_have_no_common_stream() -> None:
    """SplitMix64 advances by this constant: a state that began at the bare seed would be another's, one position on."""
    seeds = np.arange(100, dtype=np.uint64)
    shifted = uniform_numbers(seeds + np.uint64(0x9E3779B97F4A7C15), np.full(100, 4, np.uint64))
    assert not np.isin(shifted, uniform_numbers(seeds, np.full(100, 5, np.uint64))).any()


@pytest.mark.parametrize(("seed_step", "position_step"), [(0, 0), (0, 1), (1, 0), (1, 1), (1, -1)])
def test_numbers_of_neighbours_are_independent(seed_step: int, position_step: int) -> None:
    """Pairs of 300 neighbouring seeds at 300 positions in 16 x 16 squares; the first case is each number alone."""
    seeds, positions = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(1, 301, dtype=np.uint64))
    here = (16 * uniform_numbers(seeds.ravel(), positions.ravel())).astype(int)
    if not seed_step and not position_step:
        assert_chi_square(np.bincount(here, minlength=16), np.full(16, len(here) / 16))
        return
    moved = uniform_numbers(
        seeds.ravel() + np.uint64(seed_step), (positions.astype(int).ravel() + position_step).astype("u8")
    )
    squares = 16 * here + (16 * moved).astype(int)
    assert_chi_square(np.bincount(squares, minlength=256), np.full(256, len(here) / 256))

"""What the engine quantises emulated FP8 with on a CPU, a compiled codec, gives the reference's result bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_codec import random_weight

from appliance.errors import NumericsError
from appliance.quant.codec import quantise, weight_absmax
from appliance.quant.numba_fp8 import quantise_fp8_numba
from appliance.terms.schemes import Scheme

FP8 = (Scheme.FP8, Scheme.FP8_CHANNEL, Scheme.FP8_BLOCK)


def every_finite() -> torch.Tensor:
    every_N = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    return every_N[torch.isfinite(every_N)]


def assert_identical(weight_NK: torch.Tensor, *, scheme: Scheme, absmax: torch.Tensor | None = None) -> None:
    quantised, expected = (f(weight_NK, scheme=scheme, absmax=absmax) for f in (quantise_fp8_numba, quantise))
    assert (quantised.block, quantised.scheme, quantised.codes_NK.dtype) == (
        expected.block,
        scheme,
        torch.float8_e4m3fn,
    )
    assert quantised.codes_NK.is_contiguous()
    assert torch.equal(quantised.scale.view(torch.int32), expected.scale.view(torch.int32))
    assert torch.equal(quantised.codes_NK.view(torch.uint8), expected.codes_NK.view(torch.uint8))


@pytest.mark.parametrize("scheme", FP8)
@pytest.mark.parametrize(
    "shape", [(1, 1), (5, 40), (128, 128), (127, 129), (130, 300), (257, 384), (3, 1000), (600, 7)]
)
def test_shapes(scheme: Scheme, shape: tuple[int, int]) -> None:
    assert_identical(random_weight(shape, dtype=torch.bfloat16), scheme=scheme)


@pytest.mark.parametrize("scheme", FP8)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types_are_the_codecs(scheme: Scheme, dtype: torch.dtype) -> None:
    assert_identical(random_weight((130, 150), dtype=dtype), scheme=scheme)


@pytest.mark.parametrize("scheme", FP8)
def test_every_finite_bfloat16_with_many_scales(scheme: Scheme) -> None:
    """All 65280 finite values, with 24 absmaxes: what is larger saturates, what is smaller meets every tie."""
    every_N = every_finite()
    assert len(every_N) == 65280
    weight_NK = every_N.view(-1, 128)
    shape = weight_absmax(weight_NK, scheme=scheme).shape
    generator = torch.Generator().manual_seed(0)
    assert_identical(weight_NK, scheme=scheme)
    for exponent in range(-60, 60, 5):
        absmax = (1 + torch.rand(shape, generator=generator)) * 2.0**exponent
        assert_identical(weight_NK, scheme=scheme, absmax=absmax)


@pytest.mark.parametrize("scheme", FP8)
def test_ties(scheme: Scheme) -> None:
    """A scale of 1: every value half-way between two codes, and every code, of both signs."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    half_N = (values[1:] + values[:-1]) / 2
    row = torch.cat([values, half_N, -values, -half_N]).to(torch.bfloat16)
    assert torch.equal(row.float()[127:253], half_N)  # BF16 holds them
    assert_identical(row[None], scheme=scheme, absmax=torch.full((1, 4 if scheme is Scheme.FP8_BLOCK else 1), 448.0))


@given(bits=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=40), scheme=st.sampled_from(FP8))
@settings(deadline=None, max_examples=150, derandomize=True)
def test_any_weight(bits: list[int], scheme: Scheme) -> None:
    row = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert_identical(torch.where(torch.isfinite(row), row, 0)[None], scheme=scheme)


@pytest.mark.parametrize("scheme", FP8)
def test_zeros_and_denormals(scheme: Scheme) -> None:
    weight_NK = random_weight((260, 300), dtype=torch.bfloat16)
    weight_NK[128:256] = 0
    weight_NK[:, 128:256] = -0.0
    assert_identical(weight_NK, scheme=scheme)
    assert_identical(torch.zeros_like(weight_NK), scheme=scheme)
    assert_identical(torch.tensor([[2.0**-130, -(2.0**-131), 0.0]], dtype=torch.bfloat16), scheme=scheme)


@pytest.mark.parametrize("scheme", FP8)
def test_strides(scheme: Scheme) -> None:
    weight_NK = random_weight((300, 140), dtype=torch.bfloat16)
    for strided_NK in (weight_NK.t(), weight_NK[::2], weight_NK[:, 3:130]):
        assert_identical(strided_NK, scheme=scheme)


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
@pytest.mark.parametrize("scheme", FP8)
def test_threads_do_not_change_the_result(scheme: Scheme, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_identical(random_weight((900, 260), dtype=torch.bfloat16), scheme=scheme)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scheme", FP8)
def test_a_value_that_is_not_finite_raises(bad: float, scheme: Scheme) -> None:
    weight_NK = random_weight((140, 150), dtype=torch.bfloat16)
    weight_NK[139, 149] = bad
    with pytest.raises(NumericsError) as raised:
        quantise_fp8_numba(weight_NK, scheme=scheme)
    assert raised.value.message == "a weight to quantise has a value that is not finite"

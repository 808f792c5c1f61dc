"""The INT8 codec against plain float64 and float32 references in numpy.

Legend: N output channels (rows), K input channels.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.errors import NumericsError
from appliance.quant import codec
from appliance.quant.codec import QuantisedWeight
from appliance.quant.codec_int8 import dequantise_int8, quantise_int8, quantise_int8_tokens

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((1, 1), (1, 64), (64, 1), (3, 7), (16, 33), (65, 128), (40, 1000))
NORMAL = 2.0**-126  # the smallest normal float32


def random_weight(shape: tuple[int, int], *, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes: a row's scale must not reach another row."""
    generator = torch.Generator().manual_seed(seed)
    weight_NK = torch.randn(shape, generator=generator)
    sizes_N1 = 2.0 ** torch.randint(-8, 8, (shape[0], 1), generator=generator)
    return (weight_NK * sizes_N1).to(dtype)


def reference_float32(weight_NK: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """codes and scales by the formulas of the codec's docstring, in numpy's float32, one rounding per operation."""
    w_NK = weight_NK.float().numpy()
    scale_N1 = np.abs(w_NK).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(all="ignore"):
        scaled_NK = w_NK * (np.float32(1) / scale_N1)
    scaled_NK[np.broadcast_to(scale_N1 == 0, w_NK.shape)] = 0
    scaled_NK[w_NK == 0] = 0
    return np.clip(np.rint(scaled_NK), -127, 127).astype(np.int8), scale_N1


def assert_within_bound(weight_NK: torch.Tensor, quantised: QuantisedWeight) -> None:
    """|w - w'| <= s * (1/2 + 127 * 2^-22), in float64.

    Rounding to a code costs 1/2 step. The reciprocal, the product with it and the product codes * s are rounded to
    float32, each by 2^-24 of a value that is at most 127 steps (and a little): 3 * 127 * 2^-24 < 127 * 2^-22.
    """
    scale_N1 = quantised.scale.double()
    held_N = ((scale_N1 >= NORMAL) & torch.isfinite(quantised.scale * 127)).squeeze(1)
    error_NK = (weight_NK.double() - dequantise_int8(quantised).double()).abs()
    assert bool((error_NK <= scale_N1 * (0.5 + 127 * 2.0**-22))[held_N].all())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_and_scales_equal_the_formulas(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight_NK = random_weight(shape, dtype=dtype)
    codes_NK, scale_N1 = reference_float32(weight_NK)
    quantised = quantise_int8(weight_NK)
    assert quantised.codes_NK.dtype == torch.int8
    assert quantised.scale.dtype == torch.float32
    assert quantised.scale.shape == (shape[0], 1)
    assert np.array_equal(quantised.codes_NK.numpy(), codes_NK)
    assert np.array_equal(quantised.scale.numpy(), scale_N1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_within_half_a_step(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight_NK = random_weight(shape, dtype=dtype)
    assert_within_bound(weight_NK, quantise_int8(weight_NK))


def test_codes_are_the_exact_quotient_but_for_ties() -> None:
    """A code differs from round(w / s), taken in float64, by one at most and only beside a half.

    w / s is at most 127; its reciprocal and its product are rounded by 2^-24 of it each: 127 * 2^-23 from a half.
    """
    weight_NK = random_weight((256, 999), dtype=torch.float32)
    quantised = quantise_int8(weight_NK)
    exact_NK = weight_NK.double() / quantised.scale.double()
    off_NK = (quantised.codes_NK.double() - exact_NK.round()).abs()
    beside_a_half_NK = ((exact_NK - exact_NK.floor()) - 0.5).abs() <= 127 * 2.0**-23
    assert float(off_NK.max()) <= 1
    assert not bool((off_NK[~beside_a_half_NK] > 0).any())


def test_ties_go_to_even() -> None:
    """absmax 127 makes the scale and its reciprocal exactly 1."""
    weight_NK = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    assert quantise_int8(weight_NK).codes_NK.tolist() == [[127, 0, 2, 2, 0, -2, -2]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_rows_have_scale_and_codes_zero(dtype: torch.dtype) -> None:
    weight_NK = random_weight((5, 40), dtype=dtype)
    weight_NK[[1, 4]] = 0
    quantised = quantise_int8(weight_NK)
    assert (quantised.scale.squeeze(1) == 0).tolist() == [False, True, False, False, True]
    assert not bool(quantised.codes_NK[[1, 4]].any())
    assert not bool(dequantise_int8(quantised)[[1, 4]].any())
    assert_within_bound(weight_NK, quantised)


def test_rows_of_denormals_stay_finite_and_keep_their_signs() -> None:
    """Where 1/s overflows every non-zero value gets +-127: coarse, but finite and on the right side of zero."""
    weight_NK = torch.tensor([[2.0**-130, -(2.0**-131), 0.0, 2.0**-133], [1.0, -1.0, 0.25, 0.0]])
    quantised = quantise_int8(weight_NK)
    assert quantised.codes_NK.tolist() == [[127, -127, 0, 127], [127, -127, 32, 0]]
    assert bool(torch.isfinite(dequantise_int8(quantised)).all())


def test_a_scale_that_underflows_is_a_zero_row() -> None:
    smallest = 2.0**-149
    quantised = quantise_int8(torch.tensor([[smallest, -smallest, 0.0]]))
    assert quantised.scale.tolist() == [[0.0]]
    assert quantised.codes_NK.tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_values_do_not_overflow(dtype: torch.dtype) -> None:
    """Up to 4 ulps of float32 below the largest value, which only float32 can come closer to."""
    largest = torch.finfo(dtype).max
    for value in (largest, largest / 2) if dtype != torch.float32 else (largest * (1 - 2.0**-22), largest / 2):
        weight_NK = torch.tensor([[value, -value, value / 2, 0.0]], dtype=dtype)
        quantised = quantise_int8(weight_NK)
        assert quantised.codes_NK[0, :2].tolist() == [127, -127]
        assert bool(torch.isfinite(dequantise_int8(quantised)).all())
        assert_within_bound(weight_NK, quantised)


def test_the_largest_float32_has_codes_but_no_finite_value() -> None:
    """absmax / 127 is rounded up here, and 127 times that is above the largest float32."""
    largest = torch.finfo(torch.float32).max
    quantised = quantise_int8(torch.tensor([[largest, -largest, 1.0]]))
    assert quantised.codes_NK.tolist() == [[127, -127, 0]]
    assert dequantise_int8(quantised).tolist() == [[float("inf"), float("-inf"), 0.0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_minus_128_is_never_used(dtype: torch.dtype) -> None:
    weight_NK = -random_weight((500, 300), dtype=dtype).abs()
    codes_NK = quantise_int8(weight_NK).codes_NK
    assert int(codes_NK.min()) == -127
    assert bool((codes_NK.amin(dim=1) == -127).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_that_is_not_finite_raises(bad: float, dtype: torch.dtype) -> None:
    weight_NK = random_weight((4, 9), dtype=dtype)
    weight_NK[2, 5] = bad
    for function, tensor_name in ((quantise_int8, "a weight"), (quantise_int8_tokens, "an activation")):
        with pytest.raises(NumericsError) as raised:
            function(weight_NK)
        assert raised.value.message == f"{tensor_name} to quantise has a value that is not finite"


def test_activations_have_the_codes_of_weights() -> None:
    tokens_MK = random_weight((300, 70), dtype=torch.bfloat16)
    tokens_MK[3] = 0
    found, wanted = quantise_int8_tokens(tokens_MK), quantise_int8(tokens_MK)
    assert torch.equal(found.codes_NK, wanted.codes_NK) and torch.equal(found.scale, wanted.scale)
    assert (found.block, found.scheme) == (wanted.block, wanted.scheme)


def test_a_shard_of_rows_gives_the_shard_of_codes() -> None:
    """Tensor parallel over output channels: each rank quantises its own rows."""
    weight_NK = random_weight((48, 100), dtype=torch.bfloat16)
    whole = quantise_int8(weight_NK)
    for num_ranks in (2, 3, 16, 48):
        parts = [quantise_int8(part) for part in weight_NK.chunk(num_ranks)]
        assert torch.equal(torch.cat([part.codes_NK for part in parts]), whole.codes_NK)
        assert torch.equal(torch.cat([part.scale for part in parts]), whole.scale)


@pytest.mark.parametrize("chunk_elements", [1, 99, 100, 101, 250, 700, 10**6])
def test_chunks_do_not_change_the_result(chunk_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """7 rows of 100: chunks smaller than a row, of exactly one, with a rest, and larger than everything."""
    weight_NK = random_weight((7, 100), dtype=torch.bfloat16)
    codes_NK, scale_N1 = reference_float32(weight_NK)
    monkeypatch.setattr(codec, "CHUNK_ELEMENTS", chunk_elements)
    quantised = quantise_int8(weight_NK)
    assert np.array_equal(quantised.codes_NK.numpy(), codes_NK)
    assert np.array_equal(quantised.scale.numpy(), scale_N1)


def test_strides_do_not_change_the_result() -> None:
    weight_NK = random_weight((24, 60), dtype=torch.bfloat16)
    whole = quantise_int8(weight_NK)
    transposed = quantise_int8(weight_NK.t().contiguous().t())
    assert torch.equal(transposed.codes_NK, whole.codes_NK)
    assert torch.equal(transposed.scale, whole.scale)
    every_other = quantise_int8(weight_NK[::2])
    assert torch.equal(every_other.codes_NK, whole.codes_NK[::2])
    sliced_NK = torch.cat([weight_NK, weight_NK * 1000], dim=1)[:, :60]
    assert torch.equal(quantise_int8(sliced_NK).codes_NK, whole.codes_NK)


def test_the_input_is_not_changed() -> None:
    weight_NK = random_weight((8, 50), dtype=torch.float32)
    before_NK = weight_NK.clone()
    quantise_int8(weight_NK)
    assert torch.equal(weight_NK, before_NK)


def test_quantising_twice_gives_the_same_codes() -> None:
    """w' lies on the grid. Its absmax is 127 * s, rounded to float32, so the scale moves by an ulp at most."""
    weight_NK = random_weight((64, 200), dtype=torch.float32)
    first = quantise_int8(weight_NK)
    second = quantise_int8(dequantise_int8(first))
    assert torch.equal(second.codes_NK, first.codes_NK)
    assert torch.allclose(second.scale, first.scale, rtol=2.0**-22, atol=0)


def bit_patterns(dtype: torch.dtype, *, bits: int) -> st.SearchStrategy[torch.Tensor]:
    """[N, K] of any finite values of the format, denormals and both zeros among them."""
    integer = torch.int16 if bits == 16 else torch.int32
    pattern = st.integers(min_value=-(2 ** (bits - 1)), max_value=2 ** (bits - 1) - 1)

    def build(rows: list[list[int]]) -> torch.Tensor:
        weight_NK = torch.tensor(rows, dtype=integer).view(dtype)
        return torch.where(torch.isfinite(weight_NK), weight_NK, torch.zeros_like(weight_NK))

    return st.integers(1, 20).flatmap(
        lambda k: st.lists(st.lists(pattern, min_size=k, max_size=k), min_size=1, max_size=4).map(build)
    )


WEIGHTS = st.one_of(
    bit_patterns(torch.bfloat16, bits=16), bit_patterns(torch.float16, bits=16), bit_patterns(torch.float32, bits=32)
)


@given(weight_NK=WEIGHTS)
@settings(deadline=None, max_examples=300, derandomize=True)
def test_any_finite_weight(weight_NK: torch.Tensor) -> None:
    quantised = quantise_int8(weight_NK)
    codes_NK, scale_N1 = reference_float32(weight_NK)
    assert np.array_equal(quantised.codes_NK.numpy(), codes_NK)
    assert np.array_equal(quantised.scale.numpy(), scale_N1)
    assert int(quantised.codes_NK.min()) >= -127
    assert_within_bound(weight_NK, quantised)


@given(weight_NK=WEIGHTS)
@settings(deadline=None, max_examples=200, derandomize=True)
def test_negating_a_weight_negates_its_codes(weight_NK: torch.Tensor) -> None:
    one, other = quantise_int8(weight_NK), quantise_int8(-weight_NK)
    assert torch.equal(one.codes_NK, -other.codes_NK)
    assert torch.equal(one.scale, other.scale)

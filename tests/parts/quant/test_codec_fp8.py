"""FP8 codes and scales against formulas in numpy, the derived bound in float64, and what vLLM's own quantisers give.

Legend: N rows, K columns.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from test_codec import DTYPES, WEIGHTS, random_weight

from appliance.errors import NumericsError
from appliance.quant import codec
from appliance.quant.codec import QuantisedWeight, dequantise, quantise, quantise_tokens, weight_absmax
from appliance.quant.codec_fp8 import quantise_fp8_tokens
from appliance.terms.schemes import Scheme

FP8 = (Scheme.FP8, Scheme.FP8_CHANNEL, Scheme.FP8_BLOCK)
# Blocks of 128: smaller than one, exactly one, one and a rest, several and a rest, in both directions.
SHAPES = ((1, 1), (5, 40), (128, 128), (127, 129), (130, 300), (257, 384), (3, 1000))
TIE_TO_EVEN = {1.0625: 1.0, 1.1875: 1.25, 2.0**-10: 0.0, 3 * 2.0**-10: 2.0**-8, 432.0: 448.0, 416.0 + 8.0: 416.0}


def e4m3_values() -> np.ndarray:
    """The 127 values of the codes 0 to 126, by the format's definition."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, (code & 7).astype(np.float64)
    return np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


def round_to_e4m3(x: np.ndarray) -> np.ndarray:
    """float32 to the nearest value; from two equally near ones the one with the even code. Exact in float64."""
    values = e4m3_values()
    size = np.minimum(np.abs(x.astype(np.float64)), 448)
    above = np.clip(np.searchsorted(values, size), 1, 126)
    low, high = values[above - 1], values[above]
    up = (high - size < size - low) | ((high - size == size - low) & (above % 2 == 0))
    return np.copysign(np.where(up, high, low), x)


def spread(scale: np.ndarray, *, block: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    return np.repeat(np.repeat(scale, block[0], axis=0), block[1], axis=1)[: shape[0], : shape[1]]


def blocks_of(scheme: Scheme, *, shape: tuple[int, int], tokens: bool) -> tuple[int, int]:
    if scheme is Scheme.FP8_BLOCK:
        return (1, 128) if tokens else (128, 128)
    return shape if scheme is Scheme.FP8 and not tokens else (1, shape[1])


def reference(values_NK: torch.Tensor, *, scheme: Scheme, tokens: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(values of the codes, scales) by the formulas of the codec's docstring, one float32 rounding per operation."""
    w_NK = values_NK.float().numpy()
    block = blocks_of(scheme, shape=w_NK.shape, tokens=tokens)
    rows, columns = -(-w_NK.shape[0] // block[0]), -(-w_NK.shape[1] // block[1])
    absmax = np.zeros((rows, columns), dtype=np.float32)
    for row in range(rows):
        for column in range(columns):
            part = w_NK[row * block[0] : (row + 1) * block[0], column * block[1] : (column + 1) * block[1]]
            absmax[row, column] = np.abs(part).max()
    if scheme is Scheme.FP8_BLOCK:
        absmax = np.maximum(absmax, np.float32(1e-10 if tokens else 1e-4))
    scale = absmax / np.float32(448)
    if scheme is Scheme.FP8_CHANNEL or (tokens and scheme is Scheme.FP8):
        scale = np.maximum(scale, np.float32(1) / np.float32(448 * 512))
    scale_NK = spread(scale, block=block, shape=w_NK.shape)
    with np.errstate(all="ignore"):
        divide = tokens or scheme is Scheme.FP8_CHANNEL
        x_NK = w_NK / scale_NK if divide else w_NK * (np.float32(1) / scale_NK)
    x_NK[(scale_NK == 0) | (w_NK == 0)] = 0
    return round_to_e4m3(x_NK), scale


def assert_is_reference(
    values_NK: torch.Tensor, quantised: QuantisedWeight, *, scheme: Scheme, tokens: bool = False
) -> None:
    codes_NK, scale = reference(values_NK, scheme=scheme, tokens=tokens)
    assert quantised.codes_NK.dtype == torch.float8_e4m3fn
    assert quantised.scale.dtype == torch.float32
    assert quantised.block == blocks_of(scheme, shape=tuple(values_NK.shape), tokens=tokens)
    assert quantised.scale.numpy().shape == scale.shape
    assert np.array_equal(quantised.scale.numpy(), scale)
    assert np.array_equal(quantised.codes_NK.float().numpy(), codes_NK)


def assert_within_bound(values_NK: torch.Tensor, quantised: QuantisedWeight) -> None:
    """The bound of the codec's docstring, in float64, for scales of at least 2^-117."""
    shape = tuple(values_NK.shape)
    scale_NK = torch.from_numpy(spread(quantised.scale.double().numpy(), block=quantised.block, shape=shape))
    size_NK = values_NK.double().abs()
    bound_NK = torch.maximum(size_NK / 16, scale_NK / 1024) * (1 + 2.0**-22) + size_NK * 2.0**-22
    error_NK = (values_NK.double() - dequantise(quantised).double()).abs()
    assert bool((error_NK <= bound_NK)[scale_NK >= 2.0**-117].all())


def test_the_table_of_values_is_torchs() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert np.array_equal(codes.double().numpy(), e4m3_values())


@pytest.mark.parametrize("scheme", FP8)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_equal_the_formulas(scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight_NK = random_weight(shape, dtype=dtype)
    quantised = quantise(weight_NK, scheme=scheme)
    assert_is_reference(weight_NK, quantised, scheme=scheme)
    assert_within_bound(weight_NK, quantised)


@pytest.mark.parametrize("scheme", FP8)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_equal_the_formulas(scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype) -> None:
    tokens_MK = random_weight(shape, dtype=dtype, seed=1)
    quantised = quantise_tokens(tokens_MK, scheme=scheme)
    assert_is_reference(tokens_MK, quantised, scheme=scheme, tokens=True)
    assert_within_bound(tokens_MK, quantised)


@pytest.mark.parametrize("scheme", FP8)
def test_a_token_does_not_depend_on_its_neighbours(scheme: Scheme) -> None:
    tokens_MK = random_weight((9, 200), dtype=torch.bfloat16)
    whole = dequantise(quantise_tokens(tokens_MK, scheme=scheme))
    for row in range(9):
        assert torch.equal(dequantise(quantise_tokens(tokens_MK[row : row + 1], scheme=scheme))[0], whole[row])


def test_ties_go_to_even() -> None:
    """absmax 448 makes the scale 1, so each value is its own quotient."""
    weight_NK = torch.tensor([[448.0, *TIE_TO_EVEN, *(-value for value in TIE_TO_EVEN)]])
    wanted = [448.0, *TIE_TO_EVEN.values(), *(-value for value in TIE_TO_EVEN.values())]
    for scheme in FP8:
        assert quantise(weight_NK, scheme=scheme).codes_NK.float().tolist() == [wanted]


@pytest.mark.parametrize("scheme", FP8)
def test_every_finite_bfloat16_in_one_row_each(scheme: Scheme) -> None:
    every_N = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    every_N = every_N[torch.isfinite(every_N)]
    weight_NK = torch.stack([every_N, torch.ones_like(every_N)], dim=1)
    if scheme is not Scheme.FP8_CHANNEL:  # one block for all would hide most of them
        weight_NK = weight_NK[(every_N.abs() < 100) & (every_N.abs() > 2.0**-20)]
    quantised = quantise(weight_NK, scheme=scheme)
    assert_is_reference(weight_NK, quantised, scheme=scheme)
    assert_within_bound(weight_NK, quantised)


@pytest.mark.parametrize("scheme", FP8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_zeros_have_codes_zero(scheme: Scheme, dtype: torch.dtype) -> None:
    weight_NK = random_weight((260, 300), dtype=dtype)
    weight_NK[128:256] = 0
    weight_NK[:, 128:256] = 0
    for quantised in (quantise(weight_NK, scheme=scheme), quantise_tokens(weight_NK, scheme=scheme)):
        assert bool((dequantise(quantised)[weight_NK == 0] == 0).all())
        assert bool(torch.isfinite(dequantise(quantised)).all())
    nothing = quantise(torch.zeros_like(weight_NK), scheme=scheme)
    floor = {Scheme.FP8: 0.0, Scheme.FP8_CHANNEL: 1 / (448 * 512), Scheme.FP8_BLOCK: 1e-4 / 448}[scheme]
    assert nothing.scale.unique().tolist() == pytest.approx([floor], rel=1e-6, abs=0)
    assert not bool(nothing.codes_NK.float().any())


@pytest.mark.parametrize("scheme", FP8)
def test_tiny_values_stay_finite_and_keep_their_signs(scheme: Scheme) -> None:
    """Where 1/s overflows (`fp8`) the codes are +-448; the floors of the others round such values to 0."""
    weight_NK = torch.tensor([[2.0**-130, -(2.0**-131), 0.0]])
    quantised = quantise(weight_NK, scheme=scheme)
    wanted = [[448.0, -448.0, 0.0]] if scheme is Scheme.FP8 else [[0.0, 0.0, 0.0]]
    assert quantised.codes_NK.float().tolist() == wanted
    assert bool(torch.isfinite(dequantise(quantised)).all())


@pytest.mark.parametrize("scheme", FP8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_values_saturate(scheme: Scheme, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    quantised = quantise(torch.tensor([[largest, -largest, largest / 2, 0.0]], dtype=dtype), scheme=scheme)
    assert quantised.codes_NK.float().tolist() == [[448.0, -448.0, 224.0, 0.0]]


@pytest.mark.parametrize("scheme", FP8)
def test_a_given_absmax_that_is_too_small_saturates(scheme: Scheme) -> None:
    weight_NK = torch.tensor([[4.0, -4.0, 1.0]])
    quantised = quantise(weight_NK, scheme=scheme, absmax=torch.tensor([[2.0]]))
    assert quantised.codes_NK.float().tolist() == [[448.0, -448.0, 224.0]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", FP8)
def test_a_value_that_is_not_finite_raises(bad: float, dtype: torch.dtype, scheme: Scheme) -> None:
    values_NK = random_weight((140, 150), dtype=dtype)
    values_NK[139, 149] = bad
    for function, tensor_name in (
        (quantise, "a weight"),
        (weight_absmax, "a weight"),
        (quantise_tokens, "an activation"),
    ):
        with pytest.raises(NumericsError) as raised:
            function(values_NK, scheme=scheme)
        assert raised.value.message == f"{tensor_name} to quantise has a value that is not finite"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("scheme", FP8)
def test_unchecked_a_token_that_is_not_finite_becomes_nan_alone(bad: float, scheme: Scheme) -> None:
    """In a block at least the bad value itself, so that the product with it is NaN."""
    tokens_MK = random_weight((4, 300), dtype=torch.bfloat16)
    before_MK = dequantise(quantise_fp8_tokens(tokens_MK, scheme=scheme))
    tokens_MK[2, 7] = bad
    after_MK = dequantise(quantise_fp8_tokens(tokens_MK, scheme=scheme, finite=False))
    assert bool(after_MK[2, 7].isnan())
    others = [0, 1, 3]
    assert torch.equal(after_MK[others], before_MK[others])


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("scheme", [Scheme.INT8, *FP8])
def test_a_shard_with_the_whole_absmax_gives_the_shard_of_codes(scheme: Scheme, num_ranks: int) -> None:
    """Tensor parallel over rows (output channels) and over columns (input channels)."""
    weight_NK = random_weight((384 * num_ranks, 256 * num_ranks), dtype=torch.bfloat16)
    whole = quantise(weight_NK, scheme=scheme)
    absmax = weight_absmax(weight_NK, scheme=scheme)
    for dim in (0, 1):
        shards = weight_NK.chunk(num_ranks, dim=dim)
        absmaxes = absmax.chunk(num_ranks, dim=dim) if absmax.shape[dim] > 1 else [absmax] * num_ranks
        parts = [quantise(shard, scheme=scheme, absmax=part) for shard, part in zip(shards, absmaxes, strict=True)]
        assert torch.equal(torch.cat([part.codes_NK for part in parts], dim=dim).float(), whole.codes_NK.float())
        if absmax.shape[dim] > 1:
            assert torch.equal(torch.cat([part.scale for part in parts], dim=dim), whole.scale)
        else:
            assert all(torch.equal(part.scale, whole.scale) for part in parts)


def test_without_the_whole_absmax_a_shard_of_columns_has_other_scales() -> None:
    """What the test above would not show if the absmax were ignored."""
    weight_NK = random_weight((256, 512), dtype=torch.bfloat16)
    for scheme in (Scheme.INT8, Scheme.FP8_CHANNEL):
        whole = quantise(weight_NK, scheme=scheme)
        assert not torch.equal(quantise(weight_NK[:, :256], scheme=scheme).scale, whole.scale)


@pytest.mark.parametrize("shape", [(1, 1), (130, 300), (129, 128), (128, 1)])
def test_ragged_blocks_are_those_of_a_weight_padded_with_zeros(shape: tuple[int, int]) -> None:
    weight_NK = random_weight(shape, dtype=torch.bfloat16)
    padded_NK = torch.nn.functional.pad(weight_NK, (0, -shape[1] % 128, 0, -shape[0] % 128))
    ragged, padded = quantise(weight_NK, scheme=Scheme.FP8_BLOCK), quantise(padded_NK, scheme=Scheme.FP8_BLOCK)
    assert torch.equal(ragged.scale, padded.scale)
    assert torch.equal(ragged.codes_NK.float(), padded.codes_NK[: shape[0], : shape[1]].float())


@pytest.mark.parametrize("chunk_elements", [1, 299, 300, 900, 5000, 10**7])
@pytest.mark.parametrize("scheme", FP8)
def test_chunks_do_not_change_the_result(scheme: Scheme, chunk_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_NK = random_weight((140, 300), dtype=torch.bfloat16)
    monkeypatch.setattr(codec, "CHUNK_ELEMENTS", chunk_elements)
    assert_is_reference(weight_NK, quantise(weight_NK, scheme=scheme), scheme=scheme)
    assert_is_reference(weight_NK, quantise_tokens(weight_NK, scheme=scheme), scheme=scheme, tokens=True)


@pytest.mark.parametrize("scheme", FP8)
def test_strides_do_not_change_the_result(scheme: Scheme) -> None:
    weight_NK = random_weight((300, 140), dtype=torch.bfloat16)
    for strided_NK in (weight_NK.t(), weight_NK[::2], weight_NK[:, 3:130]):
        whole, plain = quantise(strided_NK, scheme=scheme), quantise(strided_NK.contiguous(), scheme=scheme)
        assert torch.equal(whole.scale, plain.scale)
        assert torch.equal(whole.codes_NK.float(), plain.codes_NK.float())


@pytest.mark.parametrize("scheme", FP8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_input_is_not_changed(scheme: Scheme, dtype: torch.dtype) -> None:
    weight_NK = random_weight((130, 140), dtype=dtype)
    before_NK = weight_NK.clone()
    quantise(weight_NK, scheme=scheme)
    quantise_tokens(weight_NK, scheme=scheme)
    assert torch.equal(weight_NK, before_NK)


def test_bf16_does_not_quantise() -> None:
    for function in (quantise, weight_absmax, quantise_tokens):
        with pytest.raises(ValueError, match="`bf16` does not quantise"):
            function(torch.ones(2, 2), scheme=Scheme.BF16)


@given(weight_NK=WEIGHTS)
@settings(deadline=None, max_examples=150, derandomize=True)
def test_any_finite_weight(weight_NK: torch.Tensor) -> None:
    for scheme in FP8:
        quantised = quantise(weight_NK, scheme=scheme)
        assert_is_reference(weight_NK, quantised, scheme=scheme)
        assert_within_bound(weight_NK, quantised)
        tokens = quantise_tokens(weight_NK, scheme=scheme)
        assert_is_reference(weight_NK, tokens, scheme=scheme, tokens=True)

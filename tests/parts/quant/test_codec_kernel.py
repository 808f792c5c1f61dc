"""What the engine quantises with on a CPU, vLLM's own row quantiser, gives the codec's result bit for bit."""

from __future__ import annotations

import pytest
import torch

from appliance.errors import NumericsError
from appliance.quant.codec_int8 import quantise_int8

pytestmark = pytest.mark.engine

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The kernel works on 16 elements at once: lengths below, at and beside its multiples, one row and many.
LENGTHS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 64, 100, 127, 128, 352, 1000, 2049)
ROWS = (1, 2, 3, 17, 128)


def assert_identical(weight_NK: torch.Tensor) -> None:
    from appliance.engine.int8 import quantise_for_kernel

    quantised, expected = quantise_for_kernel(weight_NK), quantise_int8(weight_NK)
    assert quantised.scale.shape == expected.scale.shape
    assert torch.equal(quantised.scale, expected.scale)
    assert torch.equal(quantised.codes_NK, expected.codes_NK)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_shapes(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    for rows in ROWS:
        for length in LENGTHS:
            assert_identical(torch.randn(rows, length, generator=generator).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_sizes_of_values(dtype: torch.dtype) -> None:
    """A row per power of two, from the smallest denormal to the largest exponent of float32."""
    generator = torch.Generator().manual_seed(4)
    exponents_N = torch.arange(-150, 128)
    weight_NK = torch.randn(len(exponents_N), 100, generator=generator).clamp(-0.99, 0.99).double()
    weight_NK = (weight_NK * 2.0 ** exponents_N.double()[:, None]).to(dtype)
    assert_identical(weight_NK[torch.isfinite(weight_NK).all(dim=1)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_values(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    assert_identical(torch.tensor([[largest, -largest, 1.0, 0.0], [-largest, largest / 3, 2.0, -1.0]], dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_rows_beside_others(dtype: torch.dtype) -> None:
    weight_NK = torch.randn(9, 50, generator=torch.Generator().manual_seed(5)).to(dtype)
    weight_NK[::3] = 0
    assert_identical(weight_NK)
    assert_identical(torch.zeros(4, 33, dtype=dtype))


def test_every_finite_bfloat16_in_one_row_each() -> None:
    """All 65280 finite values, each alone with a 1 and with a smallest denormal."""
    every_N = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    every_N = every_N[torch.isfinite(every_N)]
    assert len(every_N) == 65280
    for companion in (0.0, 1.0, 2.0**-133):
        assert_identical(torch.stack([every_N, torch.full_like(every_N, companion)], dim=1))


def test_ties_and_their_neighbours() -> None:
    """Values a few float32 steps beside k + 1/2 of a row with scale 1, where one rounding too many would show."""
    halves_K = torch.arange(-126, 127).float() + 0.5
    steps = [halves_K]
    for _ in range(4):
        steps = [torch.nextafter(steps[0], torch.tensor(-1e9)), *steps, torch.nextafter(steps[-1], torch.tensor(1e9))]
    for scale in (1.0, 1 / 3, 0.7, 1e-3, 3e4):
        rows = [torch.cat([torch.tensor([127.0]), row_K]) * scale for row_K in steps]
        assert_identical(torch.stack(rows))


def test_strides() -> None:
    weight_NK = torch.randn(64, 96, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16)
    assert_identical(weight_NK.t())
    assert_identical(weight_NK[::2])
    assert_identical(weight_NK[:, 16:80])
    assert_identical(weight_NK[:, ::2])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_raises(bad: float) -> None:
    from appliance.engine.int8 import quantise_for_kernel

    weight_NK = torch.randn(4, 40).to(torch.bfloat16)
    weight_NK[3, 39] = bad
    with pytest.raises(NumericsError) as raised:
        quantise_for_kernel(weight_NK)
    assert raised.value.message == "a weight to quantise has a value that is not finite"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shard_of_columns_with_the_absmax_of_whole_rows(dtype: torch.dtype) -> None:
    """What a rank of a row-parallel layer holds is the shard of what one rank would hold."""
    from appliance.engine.int8 import quantise_for_kernel

    generator = torch.Generator().manual_seed(7)
    weight_NK = torch.randn(33, 4 * 31, generator=generator).to(dtype)
    weight_NK[:, 0] *= 5  # the largest value is in the first shard of most rows
    weight_NK[3] = 0
    weight_NK[4] = 0
    weight_NK[4, -1] = 1  # zero in all shards but the last
    weight_NK[5] = 2.0**-133 if dtype is not torch.float16 else 2.0**-24
    whole = quantise_int8(weight_NK)
    absmax_N1 = weight_NK.abs().amax(dim=1, keepdim=True).float()
    for rank, shard_NK in enumerate(weight_NK.chunk(4, dim=1)):
        quantised = quantise_for_kernel(shard_NK, absmax=absmax_N1)
        assert torch.equal(quantised.scale, whole.scale)
        assert torch.equal(quantised.codes_NK, whole.codes_NK.chunk(4, dim=1)[rank])
        assert quantised.codes_NK.is_contiguous()

"""Magnitudes read off the bits are those of the floats."""

from __future__ import annotations

import pytest
import torch
from test_codec import DTYPES, random_weight

from appliance.errors import NumericsError
from appliance.quant import codec
from appliance.quant.codec import all_finite, block_absmax, require_finite, row_absmax


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_elements", [1, 64, 10**6])
def test_row_absmax(dtype: torch.dtype, chunk_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "CHUNK_ELEMENTS", chunk_elements)
    values_MK = random_weight((50, 33), dtype=dtype)
    values_MK[7] = 0
    values_MK[8] = -0.0
    assert torch.equal(row_absmax(values_MK), values_MK.abs().amax(dim=1, keepdim=True).float())
    assert torch.equal(row_absmax(values_MK.t()), values_MK.t().abs().amax(dim=1, keepdim=True).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, 7), (4, 5)])
def test_block_absmax(dtype: torch.dtype, block: tuple[int, int]) -> None:
    values_MK = random_weight((131, 260), dtype=dtype)
    absmax = block_absmax(values_MK, block=block)
    for row in range(absmax.shape[0]):
        for column in range(absmax.shape[1]):
            part = values_MK[row * block[0] :, column * block[1] :][: block[0], : block[1]]
            assert absmax[row, column] == part.abs().max().float()
    assert absmax.shape == (-(-131 // block[0]), -(-260 // block[1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_never_lost(dtype: torch.dtype, bad: float) -> None:
    for row, column in ((0, 0), (129, 259), (64, 130)):
        values_MK = random_weight((130, 260), dtype=dtype)
        values_MK[row, column] = bad
        for absmax in (row_absmax(values_MK), block_absmax(values_MK, block=(128, 128))):
            assert int((~torch.isfinite(absmax)).sum()) == 1
            with pytest.raises(NumericsError):
                require_finite(absmax, tensor_name="a weight")
        assert not all_finite(values_MK)
        values_MK[5, 5] = -bad
        assert not all_finite(values_MK)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_that_overflows_is_not_a_value_that_is_not_finite(dtype: torch.dtype) -> None:
    largest = torch.full((4, 40), torch.finfo(dtype).max, dtype=dtype)
    assert torch.isinf(largest.sum()) and all_finite(largest)
    assert all_finite(largest[:0])

"""Ranks of tokens, against a comparison and a sum."""

from __future__ import annotations

import pytest
import torch

from appliance.engine.rank_kernel import count_at_least


@pytest.mark.parametrize("shape", [(1, 1), (3, 259), (40, 49_152), (2, 152_064)])
def test_ranks_are_those_of_a_sum(shape: tuple[int, int]) -> None:
    values_BV = torch.randn(shape, generator=torch.Generator().manual_seed(1)).log_softmax(dim=1)
    values_BV[:, ::7] = -torch.inf
    if shape[0] > 1:
        values_BV[1, 5] = torch.nan
    token_B1 = torch.arange(shape[0])[:, None] % shape[1]
    threshold_B1 = values_BV.gather(1, token_B1)
    counts_B = count_at_least(values_BV, threshold_B1)
    assert counts_B.dtype is torch.int64
    assert torch.equal(counts_B, (values_BV >= threshold_B1).sum(dim=1))


def test_a_row_of_nan_counts_nothing() -> None:
    values_BV = torch.full((2, 30), torch.nan)
    assert count_at_least(values_BV, values_BV[:, :1]).tolist() == [0, 0]

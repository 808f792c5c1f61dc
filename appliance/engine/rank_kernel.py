"""How many words of a row are at least as likely as one of them, in one read of the row. B rows, V words."""

from __future__ import annotations

import numba
import numpy as np
import torch
from numpy import int32
from torch import Tensor

from appliance.quant.numba_beside_vllm import let_vllm_pass_llvmlite
from appliance.quant.row_threads import for_parts_of_rows

let_vllm_pass_llvmlite()

_VALUES_OF_A_THREAD = 1 << 18  # fewer are counted before another thread has woken


def count_at_least(values_BV: Tensor, threshold_B1: Tensor) -> Tensor:
    """Count the values that are at least the row's threshold, [B] int64; a NaN is not.  Both float32, on a CPU."""
    counts_B = torch.empty(len(values_BV), dtype=torch.int64)
    values, threshold, counts = values_BV.contiguous().numpy(), threshold_B1.contiguous().numpy(), counts_B.numpy()
    rows, vocabulary = values.shape

    def count_part(part: slice) -> None:
        _count_rows(values[part], threshold[part], counts[part])

    for_parts_of_rows(count_part, rows=rows, multiple=max(1, _VALUES_OF_A_THREAD // vocabulary))
    return counts_B


@numba.njit(nogil=True)
def _count_rows(values_BV, threshold_B1, counts_B):
    for b in range(values_BV.shape[0]):
        row, threshold, count = values_BV[b], threshold_B1[b, 0], int32(0)
        for v in range(row.shape[0]):
            count = int32(count + int32(row[v] >= threshold))  # narrowed, or the loop would not be vectorised
        counts_B[b] = np.int64(count)

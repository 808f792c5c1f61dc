"""The largest magnitude of each row, block or tensor: exact, in one pass through the cache.

The bits of a float without its sign, read as an integer, have the order of its magnitude, and those of infinity and NaN
come last. Integers are reduced several times faster than floats on a CPU, and no value that is not finite is lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from appliance.errors import NumericsError

CHUNK_ELEMENTS = 1 << 18  # 1 MiB in float32: intermediates stay in a core's cache; measured flat from 2^17 to 2^20
_GPU_CHUNK_ELEMENTS = 1 << 24  # there it is the number of launches that counts; bounds the intermediate to 64 MiB
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def chunk_rows(values_MK: Tensor, *, chunk_elements: int) -> int:
    """How many rows are worked on at once. chunk_elements: on a CPU, by each thread."""
    on_cpu = values_MK.device.type == "cpu"
    elements = chunk_elements * torch.get_num_threads() if on_cpu else _GPU_CHUNK_ELEMENTS
    return max(1, elements // max(1, values_MK.shape[1]))


def row_absmax(values_MK: Tensor) -> Tensor:
    """[M, 1] float32, not checked. values_MK: [M, K] bfloat16, float16 or float32, K > 0."""
    bits_MK = values_MK.view(_BITS[values_MK.dtype])
    most_M1 = torch.empty((len(bits_MK), 1), dtype=bits_MK.dtype, device=bits_MK.device)
    rows = chunk_rows(bits_MK, chunk_elements=CHUNK_ELEMENTS)
    magnitudes_RK = bits_MK.new_empty((min(rows, len(bits_MK)), bits_MK.shape[1]))
    for start in range(0, len(bits_MK), rows):
        part_RK = bits_MK[start : start + rows]
        own_RK = torch.bitwise_and(part_RK, torch.iinfo(bits_MK.dtype).max, out=magnitudes_RK[: len(part_RK)])
        torch.amax(own_RK, dim=1, keepdim=True, out=most_M1[start : start + rows])
    return most_M1.view(values_MK.dtype).float()


def block_absmax(values_MK: Tensor, *, block: tuple[int, int]) -> Tensor:
    """[ceil(M / rows), ceil(K / columns)] float32, not checked; blocks start at 0, 0 and the last are ragged."""
    rows, columns = block
    if rows == 1:
        return _group_absmax(values_MK, columns=columns)
    bits_MK = values_MK.view(_BITS[values_MK.dtype])
    at_once = max(1, chunk_rows(bits_MK, chunk_elements=4 * CHUNK_ELEMENTS) // rows) * rows
    most: list[Tensor] = []
    for start in range(0, len(bits_MK), at_once):
        magnitudes_RK = bits_MK[start : start + at_once] & torch.iinfo(bits_MK.dtype).max
        whole = len(magnitudes_RK) // rows * rows
        most.append(magnitudes_RK[:whole].view(-1, rows, magnitudes_RK.shape[1]).amax(dim=1))
        most += [magnitudes_RK[whole:].amax(dim=0, keepdim=True)] if whole < len(magnitudes_RK) else []
    return _group_absmax(torch.cat(most).view(values_MK.dtype), columns=columns)


def _group_absmax(values_MK: Tensor, *, columns: int) -> Tensor:
    length = values_MK.shape[1]
    padded_MK = torch.nn.functional.pad(values_MK, (0, -length % columns))
    groups_GC = padded_MK.reshape(-1, columns)
    return row_absmax(groups_GC).view(len(values_MK), -1)


def all_finite(values: Tensor) -> bool:
    """One pass without intermediates, at twice the speed of a search for the extremes: a sum loses neither NaN nor
    infinities. It may overflow, so only the extremes say that a value is not finite."""
    if values.numel() == 0 or bool(torch.isfinite(values.sum())):
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(values))).all())


def require_finite(absmax: Tensor, *, what: str) -> Tensor:
    """The same tensor. Raises NumericsError when a value is not finite; `what`: such as `a weight`."""
    if not bool(torch.isfinite(absmax).all()):
        raise NumericsError(f"{what} to quantise has a value that is not finite")
    return absmax


def divided(absmax: Tensor, *, steps: float) -> Tensor:
    """float32, one true division: dividing by a Python number may be lowered to multiplying by its reciprocal."""
    return absmax / torch.tensor(steps, dtype=torch.float32, device=absmax.device)

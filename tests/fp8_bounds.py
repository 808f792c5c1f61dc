"""How far E4M3 in blocks of 128 moves a number, by hand in float64; and values that are hard on it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

U = 2.0**-8  # one rounding to BF16
CASES = (1, 127, 129, 300)  # tokens, around a block


def odd(values: Tensor) -> Tensor:
    """The same with rows of zeros, a block of zeros, tiny rows, and single values a thousand times the others."""
    values = values.clone()
    rows, columns = values.shape
    values[3::7] = 0
    values[:, 128:256] *= (torch.arange(rows) % 5 > 0)[:, None]
    values[5::11] *= 2.0**-20
    values[torch.arange(0, rows, 4), torch.randint(columns, (len(range(0, rows, 4)),))] *= 1000
    return values


def off(values: Tensor, *, rows: int, floor: float = 1e-10) -> Tensor:
    """float64, the codec's bound max(|w| / 16, s / 1024), of blocks of rows x 128 with s = max(a, floor) / 448."""
    wide = values.detach().double().abs()
    height, width = wide.shape
    blocks = pad(wide, (0, -width % 128, 0, -height % rows)).unflatten(1, (-1, 128)).unflatten(0, (-1, rows))
    scale = blocks.amax(dim=(1, 3), keepdim=True).clamp_min(floor) / 448
    scale = scale.expand(blocks.shape).flatten(2, 3).flatten(0, 1)[:height, :width]
    return torch.maximum(wide / 16, scale / 1024) * (1 + 2.0**-22) + wide * 2.0**-22

"""The random state of the process that drives the training, as JSON values: no pickle is needed to read it back."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class DriverRandom:
    """torch: hex bytes.  numpy, python: what their own `get_state` gives, as lists."""

    torch: str
    numpy: list[Any]
    python: list[Any]


def take_random() -> DriverRandom:
    kind, keys, position, has_gauss, cached = np.random.get_state()
    version, inner, gauss = random.getstate()
    return DriverRandom(
        torch=bytes(torch.get_rng_state().tolist()).hex(),
        numpy=[kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        python=[version, list(inner), gauss],
    )


def restore_random(state: DriverRandom) -> None:
    """Raises ValueError or TypeError for values that are no random state."""
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(state.torch)), dtype=torch.uint8))
    kind, keys, *rest = state.numpy
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    version, inner, gauss = state.python
    random.setstate((version, tuple(inner), gauss))

"""The scales of a run's first weight update, kept in `sync/` of its folder: later attempts count from them too."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from appliance.run.acknowledge import SYNC_FOLDER

Key = tuple[str, int]  # name of a layer, number of one of its weights
Kind = tuple[float, int, torch.Size]  # of codes: largest magnitude, columns that share a scale, shape of the scales
FirstScales = dict[tuple[Key, Kind], Tensor]  # [R, S] of R sampled rows, S scales in each


def read_first_scales(run_dir: Path, *, replica: int, rank: int) -> FirstScales:
    """As the earliest attempt that had an update left them; empty in that attempt. Raises OSError."""
    kept = run_dir.glob(f"logs/*/{SYNC_FOLDER}/{_name(replica, rank)}")
    oldest = min(kept, key=lambda path: int(path.parts[-3]), default=None)
    first: FirstScales = {}
    for text, scale_RS in (load_file(oldest) if oldest else {}).items():
        name, number, largest, columns = json.loads(text)
        first[(name, number), (largest, columns, scale_RS.shape)] = scale_RS
    return first


def write_first_scales(run_dir: Path, first: FirstScales, *, replica: int, rank: int) -> None:
    """Whole or not at all. Raises OSError."""
    path = run_dir / SYNC_FOLDER / _name(replica, rank)
    path.parent.mkdir(exist_ok=True)
    named = {
        json.dumps([*key, largest, columns]): scale_RS.contiguous()
        for (key, (largest, columns, _)), scale_RS in first.items()
    }
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    save_file(named, partial)
    partial.replace(path)


def _name(replica: int, rank: int) -> str:
    return f"scales-{replica}-{rank}.safetensors"

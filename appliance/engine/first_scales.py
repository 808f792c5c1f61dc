"""The scales of a run's first weight update, kept in `sync/` of its folder: later engines and attempts start there."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from appliance.files import whole_file
from appliance.record.events import append_event
from appliance.sync.records import SYNC_FOLDER

Key = tuple[str, int]  # name of a layer, number of one of its weights
Kind = tuple[float, int, torch.Size]  # of codes: largest magnitude, columns that share a scale, shape of the scales
FirstScales = dict[tuple[Key, Kind], Tensor]  # [R, S] of R sampled rows, S scales in each


def read_first_scales(run_dir: Path, *, replica: int, rank: int) -> FirstScales:
    """As an engine before this one left them, in this attempt or in the newest one that had an update: with all that it
    read itself. Empty for the first engine of a run.

    A file that cannot be read counts as none, with a `note`: it is about a metric. Raises OSError where that cannot be
    written.
    """
    name = _name(replica, rank)
    before = run_dir.glob(f"logs/*/{SYNC_FOLDER}/{name}")
    newest_first = sorted(before, key=lambda path: int(path.parts[-3]), reverse=True)
    for path in (run_dir / SYNC_FOLDER / name, *newest_first):
        try:
            return _read(path)
        except FileNotFoundError:
            continue
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            what = f"{path.relative_to(run_dir)} cannot be read: scale_drift counts from an older file, or from now"
            append_event(run_dir, kind="note", what=what, why=f"{type(error).__name__}: {error}")
    return {}


def _read(path: Path) -> FirstScales:
    """Raises OSError, SafetensorError, and ValueError or TypeError for names that are not ours."""
    first: FirstScales = {}
    for text, scale_RS in load_file(path).items():
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
    with whole_file(path) as partial:
        save_file(named, partial)


def _name(replica: int, rank: int) -> str:
    return f"scales-{replica}-{rank}.safetensors"

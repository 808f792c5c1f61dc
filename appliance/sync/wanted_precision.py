"""The precision that the next weight update asks of the engines, in `sync/precision.json`: the trainer's driver writes
it, its senders read it and put it in front of the stream. No file: as planned.
"""

from __future__ import annotations

from pathlib import Path

from appliance.errors import SyncError
from appliance.files import write_whole
from appliance.sync.precision import AS_PLANNED, Precision
from appliance.sync.records import SYNC_FOLDER

WANTED_FILE = "precision.json"


def write_wanted(run_dir: Path, precision: Precision) -> None:
    """Raises OSError."""
    target = run_dir / SYNC_FOLDER / WANTED_FILE
    if precision.is_planned:
        target.unlink(missing_ok=True)
        return
    target.parent.mkdir(exist_ok=True)
    write_whole(target, precision.to_json() + "\n", durable=False)


def read_wanted(run_dir: Path) -> Precision:
    """Raises SyncError when the file cannot be read."""
    path = run_dir / SYNC_FOLDER / WANTED_FILE
    try:
        return Precision.from_json(path.read_text())
    except FileNotFoundError:
        return AS_PLANNED
    except (OSError, ValueError) as error:
        raise SyncError(f"{path}: the wanted precision cannot be read: {error}") from error

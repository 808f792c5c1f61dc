"""Finding a profile again: by the hash of the model's files, of the text, and of every setting. Imports no torch.

A file's hash is remembered with its size and time, so that it is read once.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from appliance.files import whole_file, write_whole
from appliance.hub import MODEL_FILES
from appliance.profile.job import HASHES, ProfileJob, cache_folder
from appliance.quant.files import PROFILE_FILE
from appliance.record.liveness import Heartbeat

_VERSION = 1  # raise it when the same inputs give another profile
_PLACES = {"target", "report_dir", "cache_dir", "model", "revision", "parquet", "trust_remote_code"}


def model_hash(folder: Path, *, cache_dir: Path) -> str:
    """sha256 over names and contents of the model's files. Raises OSError when one cannot be read."""
    files = sorted({file for pattern in MODEL_FILES for file in folder.glob(pattern) if file.is_file()})
    heart, hashes = Heartbeat(), []
    for file in files:
        hashes.append([file.name, file_hash(file, cache_dir=cache_dir)])
        heart.beat()
    return _digest(hashes)


def file_hash(file: Path, *, cache_dir: Path) -> str:
    """sha256 of a file's content, remembered in the cache by its size and time of change."""
    memory = cache_dir / HASHES
    known = _read(memory)
    now = file.stat()
    name, state = str(file.resolve()), [now.st_size, now.st_mtime_ns]
    if name in known and known[name][:2] == state:
        return known[name][2]
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    _write(memory, {**_read(memory), name: [*state, found]})
    return found


def profile_key(job: ProfileJob, *, model: str, data: str) -> str:
    """16 hex digits. model, data: hashes."""
    settings = job.model_dump(mode="json", exclude=_PLACES)
    return _digest({"version": _VERSION, "model": model, "data": data, **settings})[:16]


def key_of(job: ProfileJob, *, folder: Path) -> tuple[str, str, str]:
    """(key, model hash, data hash). folder: the model's. Raises OSError when a file cannot be read."""
    cache_dir = Path(job.cache_dir)
    model = model_hash(folder, cache_dir=cache_dir)
    source = Path(job.donor) if job.donor else Path(job.parquet)
    data = model_hash(source, cache_dir=cache_dir) if job.donor else file_hash(source, cache_dir=cache_dir)
    return profile_key(job, model=model, data=data), model, data


def find_profile(job: ProfileJob) -> Path | None:
    """The folder in the cache that has this profile already, None when there is none or the model is not here."""
    folder = Path(job.model)
    if not (folder / "config.json").is_file() or not (job.donor or Path(job.parquet).is_file()):
        return None
    found = cache_folder(job, key=key_of(job, folder=folder)[0])
    return found if (found / PROFILE_FILE).is_file() else None


def place_profile(found: Path, *, target: Path) -> None:
    """Copy a profile into a folder; it appears there whole or not at all. Raises OSError."""
    target.mkdir(parents=True, exist_ok=True)
    with whole_file(target / PROFILE_FILE) as partial:
        shutil.copyfile(found / PROFILE_FILE, partial)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _read(memory: Path) -> dict[str, list]:
    try:
        known = json.loads(memory.read_text())
    except (OSError, ValueError):
        return {}  # none yet, or half of one: files are read again
    return known if isinstance(known, dict) else {}


def _write(memory: Path, known: dict[str, list]) -> None:
    memory.parent.mkdir(parents=True, exist_ok=True)
    write_whole(memory, json.dumps(known), durable=False)

"""What makes a folder a checkpoint: `manifest.json`, with the size and the SHA-256 of every file, written last.

The trainer fills `partial-global_step_<n>`, seals it and renames it to `global_step_<n>`: a folder of that name was
whole once, and its manifest says whether it still is. Safetensors and verl's own files notice a cut; a flipped bit only
a hash does. The trainer seals, the launcher checks.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from appliance.files import sync_to_disk, write_whole
from appliance.record.lines import STRICT, Count, Number, as_json, parse

MANIFEST_FILE = "manifest.json"
_LARGEST_MANIFEST = 16 << 20  # bytes; one of a large model on many ranks has some hundred kilobytes
_HASHING_THREADS = 4  # hashlib lets go of the interpreter; more threads than this wait for the disk


@dataclass(frozen=True, config=STRICT)
class FileRecord:
    path: str
    """Relative, with `/`."""
    size: Count
    """Bytes."""
    sha256: str
    """Hex."""


@dataclass(frozen=True, config=STRICT)
class Facts:
    """What a checkpoint says of itself besides its files."""

    step: Count
    """The last finished one."""
    world_size: Annotated[int, Field(ge=1)]
    """Ranks of the trainer that saved it."""
    reason: str
    """Why it was saved."""
    time: Number
    """Unix s."""
    val_reward: Number | None = None
    """The greedy reward validated after this very step, None without."""
    profile: tuple[tuple[str, str], ...] = ()
    """(name, SHA-256) of the files in the run's `profile/`, which the rollouts of this run need again."""


@dataclass(frozen=True, config=STRICT)
class CheckpointManifest:
    facts: Facts
    files: tuple[FileRecord, ...]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True, config=STRICT)
class _Sealed:
    """The file. sha256: over the other two, as `_own_hash` has it."""

    sha256: str
    facts: Facts
    files: tuple[FileRecord, ...]
    schema_version: Literal[1] = 1


def seal(folder: Path, *, facts: Facts) -> CheckpointManifest:
    """Bring every file to the disk, then write the manifest. Raises OSError."""
    paths = sorted(_files(folder))
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        records = tuple(threads.map(lambda path: _record(folder, path), paths))
    manifest = CheckpointManifest(facts, records)
    sealed = _Sealed(_own_hash(manifest), facts, records)
    write_whole(folder / MANIFEST_FILE, as_json(sealed, indent=2) + "\n")
    for inner in sorted({folder, *(path.parent for path in paths)}):
        sync_to_disk(inner)
    return manifest


def read_manifest(folder: Path) -> CheckpointManifest:
    """Raises OSError when there is none, ValueError when it is not one that this program writes."""
    path = folder / MANIFEST_FILE
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError(f"{MANIFEST_FILE} is not a regular file")
    if path.stat().st_size > _LARGEST_MANIFEST:
        raise ValueError(f"{MANIFEST_FILE} has more than {_LARGEST_MANIFEST >> 20} MiB")
    sealed = parse(path.read_text(), _Sealed, place=MANIFEST_FILE)
    manifest = CheckpointManifest(sealed.facts, sealed.files)
    if sealed.sha256 != _own_hash(manifest):
        raise ValueError(f"{MANIFEST_FILE} does not say what it was written with")
    outside = [file.path for file in manifest.files if not _is_inside(file.path)]
    if outside:
        raise ValueError(f"{MANIFEST_FILE} names a file outside of the checkpoint: {outside[0]}")
    return manifest


def damage(folder: Path) -> list[str]:
    """What is wrong with a checkpoint, a line each; empty when every file is there as it was sealed.

    Reads every byte: seconds per gigabyte.
    """
    if folder.is_symlink():
        return ["a symbolic link, not the folder that was saved"]
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        return [f"no {MANIFEST_FILE}"]
    except (OSError, ValueError) as error:
        return [f"{MANIFEST_FILE} cannot be read: {error}"]
    found = {path.relative_to(folder).as_posix() for path in _files(folder)}
    more = [f"{path} is not in the manifest" for path in sorted(found - {file.path for file in manifest.files})]
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        return [line for line in threads.map(lambda file: _problem(folder, file), manifest.files) if line] + more


def _problem(folder: Path, meant: FileRecord) -> str:
    path = folder / meant.path
    try:
        if path.is_symlink() or not path.is_file():
            return f"{meant.path} is missing"
        size = path.stat().st_size
        if size != meant.size:
            return f"{meant.path} has {size} bytes instead of {meant.size}"
        return "" if hash_file(path) == meant.sha256 else f"{meant.path} has other content than was saved"
    except OSError as error:
        return f"{meant.path} cannot be read: {error.strerror or error}"


def hash_file(path: Path) -> str:
    """SHA-256, hex. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _own_hash(manifest: CheckpointManifest) -> str:
    """SHA-256 over what the manifest says: a flipped bit in it would otherwise be another truth."""
    return hashlib.sha256(json.dumps(asdict(manifest), sort_keys=True).encode()).hexdigest()


def _record(folder: Path, path: Path) -> FileRecord:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = os.fstat(file.fileno()).st_size
    return FileRecord(path.relative_to(folder).as_posix(), size=size, sha256=digest)


def _files(folder: Path) -> Iterator[Path]:
    """Everything below that is not a folder, but the manifest."""
    for path in folder.rglob("*"):
        if (path.is_symlink() or not path.is_dir()) and path != folder / MANIFEST_FILE:
            yield path


def _is_inside(path: str) -> bool:
    pure = PurePosixPath(path)
    return bool(path) and not pure.is_absolute() and ".." not in pure.parts

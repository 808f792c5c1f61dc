"""The `checkpoints/` of a run: what makes a folder one, which are whole, which to keep, and where the others go.

```
checkpoints/global_step_<n>/            whole when it was renamed in; the manifest says whether it still is
checkpoints/partial-global_step_<n>/    being written
checkpoints/deleting-global_step_<n>/   no longer wanted, on its way out
checkpoints/damaged/...                 found damaged or half written by a resume
checkpoints/cut-<attempt>/...           later than where attempt <attempt> was resumed
```
`manifest.json`, written last, has the size and the SHA-256 of every file: safetensors and verl's own files notice a
cut, a flipped bit only a hash does. The trainer seals and keeps house here, the launcher checks. Nothing damaged is
deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from appliance.files import sync_to_disk, write_whole
from appliance.record.events import read_metrics
from appliance.record.lines import STRICT, Count, Number, as_json, parse
from appliance.record.liveness import Heartbeat
from appliance.record.plan import RunPlan

FOLDER = "checkpoints"
DAMAGED = "damaged"
MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"  # the driver's part of a checkpoint; "line": what metrics.jsonl got of its step
GUARD_FILE = "guard.json"  # the governor's memory
FITS_FILE = "clipping.jsonl"  # the fits of calibrated clipping, from which the next step has its bounds
OF_A_STEP = (GUARD_FILE, FITS_FILE)  # in the run's folder, and in a checkpoint as they were at the end of its step
PROFILE_FOLDER = "profile"  # in both: the scales that every rollout of a run needs
ADAPTER_FOLDER = "adapter"  # of what a rank writes, and of `model/`: with LoRA, as PEFT reads it
SCALER_FILE = "scaler.json"  # of what rank 0 writes: in FP16, what losses are scaled by, and since when
_PARTIAL, _DELETING = "partial-", "deleting-"
_NAME = re.compile(r"global_step_(0|[1-9][0-9]{0,17})")  # as it is written, so that a step has one name
_LARGEST_MANIFEST = 16 << 20  # bytes; one of a large model on many ranks has some hundred kilobytes
_HASHING_THREADS = 4  # hashlib lets go of the interpreter; more threads than this wait for the disk


@dataclass(frozen=True, config=STRICT)
class FileRecord:
    path: str
    """Path relative to the checkpoint, with `/`."""
    size: Count
    """Size in bytes."""
    sha256: str
    """SHA-256 of the content, in hex."""


@dataclass(frozen=True, config=STRICT)
class Facts:
    """Facts about a checkpoint that its manifest has besides its files."""

    step: Count
    """Last finished step."""
    world_size: Annotated[int, Field(ge=1)]
    """Ranks of the trainer that saved it."""
    reason: str
    """Reason why it was saved."""
    time: Number
    """Time when it was saved, Unix s."""
    val_reward: Number | None = None
    """Greedy reward of the validation after this very step; None where there was no validation."""
    profile: tuple[tuple[str, str], ...] = ()
    """Files of the run's `profile/`, which the rollouts of this run need again: (name, SHA-256)."""


@dataclass(frozen=True, config=STRICT)
class CheckpointManifest:
    """Contents of `manifest.json`."""

    sha256: str
    """SHA-256 over `facts` and `files` (`_own_hash`), so that a flipped bit in them is noticed."""
    facts: Facts
    files: tuple[FileRecord, ...]
    schema_version: Literal[1] = 1

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Rejected:
    """A checkpoint that cannot be resumed from."""

    folder: Path
    why: str
    """Damage of the checkpoint, one line."""


@dataclass(frozen=True)
class CheckpointSearch:
    """Result of the search for the newest whole checkpoint."""

    newest: Path | None
    """Newest whole checkpoint; None when none is whole."""
    rejected: tuple[Rejected, ...] = ()
    """Newer checkpoints, which are damaged."""


def seal(folder: Path, *, facts: Facts) -> CheckpointManifest:
    """Bring every file to the disk, then write the manifest. Raises OSError."""
    paths = sorted(_files(folder))
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        records = tuple(threads.map(lambda path: _record(folder, path), paths))
    manifest = CheckpointManifest(_own_hash(facts, records), facts, records)
    write_whole(folder / MANIFEST_FILE, as_json(manifest, indent=2) + "\n")
    for inner in sorted({folder, *(path.parent for path in paths)}):
        sync_to_disk(inner)
    return manifest


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint. Raises OSError when there is none, ValueError when it is not one that this
    program writes."""
    path = folder / MANIFEST_FILE
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError(f"{MANIFEST_FILE} is not a regular file")
    if path.stat().st_size > _LARGEST_MANIFEST:
        raise ValueError(f"{MANIFEST_FILE} has more than {_LARGEST_MANIFEST >> 20} MiB")
    manifest = parse(path.read_text(), CheckpointManifest, place=MANIFEST_FILE)
    if manifest.sha256 != _own_hash(manifest.facts, manifest.files):
        raise ValueError(f"{MANIFEST_FILE} was changed after it was written")
    outside = [file.path for file in manifest.files if not _is_inside(file.path)]
    if outside:
        raise ValueError(f"{MANIFEST_FILE} names a file outside of the checkpoint: {outside[0]}")
    return manifest


def damage(folder: Path) -> list[str]:
    """Describe what is wrong with a checkpoint, one line for each problem; empty when every file is there as it was
    sealed. Reads every byte: seconds per gigabyte."""
    if folder.is_symlink():
        return ["a symbolic link, not the folder that was saved"]
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        return [f"no {MANIFEST_FILE}"]
    except (OSError, ValueError) as error:
        return [f"{MANIFEST_FILE} cannot be read: {error}"]
    if step_of(folder) not in (None, step := manifest.facts.step):
        return [f"{MANIFEST_FILE} is of step {step}"]
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
    """Compute the SHA-256 of a file, in hex. Raises OSError."""
    with path.open("rb") as file:
        return _hash(file)


def _hash(file: BinaryIO) -> str:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    Heartbeat().beat()  # half a terabyte of a large model takes longer than guard.stall_s
    return digest


def _own_hash(facts: Facts, files: Sequence[FileRecord]) -> str:
    content = {"facts": asdict(facts), "files": [asdict(file) for file in files]}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _record(folder: Path, path: Path) -> FileRecord:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = _hash(file)
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


def checkpoint_folder(run_dir: Path, *, step: int) -> Path:
    return run_dir / FOLDER / f"global_step_{step}"


def step_of(folder: Path) -> int | None:
    """Return the step in a checkpoint's name, None for another folder."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def partial_of(folder: Path) -> Path:
    """Return the folder that a checkpoint is written into before it gets its name."""
    return folder.with_name(_PARTIAL + folder.name)


def in_order(run_dir: Path) -> list[Path]:
    """List the folders named `global_step_<n>`, oldest first, whole or not."""
    root = run_dir / FOLDER
    folders = [each for each in root.iterdir() if step_of(each) is not None] if root.is_dir() else []
    return sorted(folders, key=lambda each: step_of(each) or 0)


def put_in_place(partial: Path, *, folder: Path) -> None:
    """Give a sealed folder its name. Raises OSError."""
    partial.rename(folder)
    sync_to_disk(folder.parent)


def find_newest(run_dir: Path) -> CheckpointSearch:
    """Find the newest checkpoint that verifies, and the newer ones that were passed over. Reads every byte of each
    checkpoint that it looks at."""
    rejected = []
    for folder in reversed(in_order(run_dir)):
        problems = damage(folder)
        if not problems:
            return CheckpointSearch(folder, tuple(rejected))
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        rejected.append(Rejected(folder, problems[0] + more))
    return CheckpointSearch(None, tuple(rejected))


def half_done(run_dir: Path) -> list[Path]:
    """List the folders that a run that was killed left half written or half deleted."""
    root = run_dir / FOLDER
    names = (_PARTIAL, _DELETING)
    return sorted(each for each in root.iterdir() if each.name.startswith(names)) if root.is_dir() else []


def is_leaving(folder: Path) -> bool:
    """Tell whether a half-done folder was being deleted."""
    return folder.name.startswith(_DELETING)


def set_aside(folder: Path, *, below: str) -> Path:
    """Move a checkpoint into a folder beside it, under a name that is free. Returns where it lies. Raises OSError."""
    target = folder.parent / below
    target.mkdir(exist_ok=True)
    names = itertools.chain([folder.name], (f"{folder.name}-{number}" for number in itertools.count(2)))
    free = next(name for name in names if not (target / name).exists())
    return folder.rename(target / free)


def surplus(saved: Sequence[Facts], *, keep: int | None, keep_best: bool) -> list[int]:
    """Return the steps of the checkpoints that are no longer wanted, oldest first. saved: all there are.  keep: how
    many of the newest stay, None for all.  keep_best: the one with the best validation reward stays too, of equals the
    newest."""
    if keep is None:
        return []
    steps = sorted(each.step for each in saved)
    staying = set(steps[-keep:])
    rated = [each for each in saved if each.val_reward is not None]
    if keep_best and rated:
        staying.add(max(rated, key=lambda each: (each.val_reward, each.step)).step)
    return [step for step in steps if step not in staying]


def remove_surplus(run_dir: Path, *, keep: int | None, keep_best: bool) -> list[int]:
    """Delete what retention no longer wants, and what an earlier deletion left. Returns the steps. Call it only when a
    newer checkpoint was verified. A folder without a readable manifest is left alone."""
    for left in half_done(run_dir):
        if is_leaving(left):
            shutil.rmtree(left)
    steps = surplus(read_saved(run_dir), keep=keep, keep_best=keep_best)
    for step in steps:
        folder = checkpoint_folder(run_dir, step=step)
        leaving = folder.rename(folder.with_name(_DELETING + folder.name))  # from here on it is no checkpoint
        shutil.rmtree(leaving)
    return steps


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest checkpoint whose manifest can be read, 0 where there is none; the files are not
    checked."""
    return max((each.step for each in read_saved(run_dir)), default=0)


def read_saved(run_dir: Path) -> list[Facts]:
    """Read the facts of every checkpoint whose manifest can be read and is of its step, oldest first; the files are not
    checked."""
    saved = []
    for folder in in_order(run_dir):
        with contextlib.suppress(OSError, ValueError):
            facts = read_manifest(folder).facts
            saved += [facts] if facts.step == step_of(folder) else []
    return saved


def line_of(checkpoint: Path) -> dict[str, Any] | None:
    """Return the line of metrics.jsonl of a checkpoint's step; None where the checkpoint has no copy of it. Raises
    OSError and ValueError."""
    return json.loads((checkpoint / STATE_FILE).read_text()).get("line")


def owed_line(run_dir: Path, *, checkpoint: Path | None, plan: RunPlan) -> dict[str, Any] | None:
    """Return the last step's line as its checkpoint has it, when a stop cut the validation that belongs into it and the
    line with the validation was never written; else None.

    checkpoint: the one that the run resumes from.  Raises OSError and ValueError when its state cannot be read.
    """
    last = plan.trainer.steps
    if checkpoint is None or step_of(checkpoint) != last or not plan.trainer.validate_every:
        return None
    line = line_of(checkpoint)
    if not line or line.get("val_reward_mean") is not None:
        return None
    is_written = any(each.step == last and each.val_reward_mean is not None for each in read_metrics(run_dir))
    return None if is_written else line

"""The `checkpoints/` of a run: which are whole, which to keep, and where the others go. Nothing damaged is deleted.

```
checkpoints/global_step_<n>/            whole when it was renamed in; the manifest says whether it still is
checkpoints/partial-global_step_<n>/    being written
checkpoints/deleting-global_step_<n>/   no longer wanted, on its way out
checkpoints/damaged/...                 found damaged or half written by a resume
checkpoints/cut-<attempt>/...           later than where attempt <attempt> was resumed
```
Standard library only: the trainer keeps house here, the launcher looks for where to resume.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.files import sync_to_disk
from appliance.record.checkpoint_manifest import damage, read_manifest

FOLDER = "checkpoints"
DAMAGED = "damaged"
GUARD_FILE = "guard.json"  # the governor's memory
FITS_FILE = "clipping.jsonl"  # the fits of calibrated clipping, from which the next step has its bounds
OF_A_STEP = (GUARD_FILE, FITS_FILE)  # in the run's folder, and in a checkpoint as they were at the end of its step
PROFILE_FOLDER = "profile"  # in both: the scales that every rollout of a run needs
_PARTIAL, _DELETING = "partial-", "deleting-"
_NAME = re.compile(r"global_step_(0|[1-9][0-9]{0,17})")  # as it is written, so that a step has one name


@dataclass(frozen=True)
class Saved:
    """A checkpoint by its manifest. val_reward: as in seal.Facts."""

    step: int
    val_reward: float | None = None


@dataclass(frozen=True)
class Rejected:
    """A checkpoint that cannot be resumed from. why: its damage, one line."""

    folder: Path
    why: str


@dataclass(frozen=True)
class CheckpointSearch:
    """What a look for the newest whole checkpoint found. newest: None when none is whole.  rejected: newer ones."""

    newest: Path | None
    rejected: tuple[Rejected, ...] = ()


def checkpoint_folder(run_dir: Path, *, step: int) -> Path:
    return run_dir / FOLDER / f"global_step_{step}"


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint's name, None for another folder."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def partial_of(folder: Path) -> Path:
    """Where the checkpoint is written before it is renamed to its name."""
    return folder.with_name(_PARTIAL + folder.name)


def in_order(run_dir: Path) -> list[Path]:
    """The folders named `global_step_<n>`, oldest first, whole or not."""
    root = run_dir / FOLDER
    folders = [each for each in root.iterdir() if step_of(each) is not None] if root.is_dir() else []
    return sorted(folders, key=lambda each: step_of(each) or 0)


def put_in_place(partial: Path, *, folder: Path) -> None:
    """Give a sealed folder its name. Raises OSError."""
    partial.rename(folder)
    sync_to_disk(folder.parent)


def find_newest(run_dir: Path) -> CheckpointSearch:
    """The newest checkpoint that verifies, with those that were passed over. Reads all of every one it looks at."""
    rejected = []
    for folder in reversed(in_order(run_dir)):
        problems = damage(folder)
        if not problems:
            return CheckpointSearch(folder, tuple(rejected))
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        rejected.append(Rejected(folder, problems[0] + more))
    return CheckpointSearch(None, tuple(rejected))


def half_done(run_dir: Path) -> list[Path]:
    """What a run that was killed left half written or half deleted."""
    root = run_dir / FOLDER
    names = (_PARTIAL, _DELETING)
    return sorted(each for each in root.iterdir() if each.name.startswith(names)) if root.is_dir() else []


def is_leaving(folder: Path) -> bool:
    """Whether a half-done folder was being deleted."""
    return folder.name.startswith(_DELETING)


def set_aside(folder: Path, *, below: str) -> Path:
    """Move a checkpoint into a folder beside it, under a name that is free. Returns where it lies. Raises OSError."""
    target = folder.parent / below
    target.mkdir(exist_ok=True)
    free = next(name for name in _names(folder.name) if not (target / name).exists())
    return folder.rename(target / free)


def _names(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}-{number}"
        number += 1


def surplus(saved: Sequence[Saved], *, keep: int | None, keep_best: bool) -> list[int]:
    """Steps of the checkpoints that are no longer wanted, oldest first.

    saved: all there are.  keep: how many of the newest stay, None for all.  keep_best: the one with the best validation
    reward stays too, of equals the newest.
    """
    if keep is None:
        return []
    steps = sorted(each.step for each in saved)
    wanted = set(steps[-keep:])
    rated = [each for each in saved if each.val_reward is not None]
    if keep_best and rated:
        wanted.add(max(rated, key=lambda each: (each.val_reward, each.step)).step)
    return [step for step in steps if step not in wanted]


def remove_surplus(run_dir: Path, *, keep: int | None, keep_best: bool) -> list[int]:
    """Delete what retention no longer wants, and what an earlier deletion left. Returns the steps.

    Call it only when a newer checkpoint was verified. A folder without a readable manifest is left alone.
    """
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
    """Of the newest checkpoint with a manifest that can be read, 0 where there is none; the files are not looked at."""
    return max((each.step for each in read_saved(run_dir)), default=0)


def read_saved(run_dir: Path) -> list[Saved]:
    """Every checkpoint with a manifest that can be read, oldest first; the files are not looked at."""
    saved = []
    for folder in in_order(run_dir):
        try:
            facts = read_manifest(folder).facts
        except (OSError, ValueError):
            continue
        saved.append(Saved(step_of(folder) or 0, val_reward=facts.val_reward))
    return saved

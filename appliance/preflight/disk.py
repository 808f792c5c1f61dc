"""Room on the disks: what a run writes there, less what its earlier attempts wrote and it continues to use.
`checkpoints/` of a run may lie on another disk than the rest of its folder: a link, or a file system mounted there."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance.finding import Finding, error, warning
from appliance.plan.memory import GIB, trained_weights
from appliance.record.checkpoints import FOLDER, step_of
from appliance.record.plan import RunPlan
from appliance.terms.shapes import ModelShape

_FOR_LOGS = GIB // 4
_TINY_CHECKPOINT = GIB // 8
_FAST = 10**9  # bytes per second of a disk that many ranks write to, by rule of thumb
BYTES_SAVED_PER_WEIGHT = 4 + 8 + 4  # FP32 weights, two Adam moments, what is exported in FP32


@dataclass(frozen=True)
class Disk:
    folder: str
    """Folder that is written to, links followed; it need not exist."""
    free_bytes: int
    number: int
    """Number of the file system, the same for all its folders."""


@dataclass(frozen=True)
class Disks:
    run: Disk
    """Disk of the run's folder, with logs, a scaled model and `model/`."""
    checkpoints: Disk
    """Disk of `checkpoints/`."""

    @property
    def are_one(self) -> bool:
        return self.run.number == self.checkpoints.number


@dataclass(frozen=True)
class Written:
    """Bytes that earlier attempts wrote into the run's folder."""

    checkpoints: int = 0
    """Bytes of the checkpoints that this attempt counts as its own; others are moved aside and stay."""
    scaled: int = 0
    """Bytes of the model that UAQ scaled."""


def read_disks(run_dir: Path) -> Disks:
    return Disks(_disk(run_dir), checkpoints=_disk(run_dir / FOLDER))


def _disk(folder: Path) -> Disk:
    real = Path(os.path.realpath(folder))
    existing = nearest_existing(real)
    return Disk(str(real), shutil.disk_usage(existing).free, number=os.stat(existing).st_dev)


def nearest_existing(path: Path) -> Path:
    """Return the path, or the first folder above it that is there. path: absolute."""
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def read_written(plan: RunPlan) -> Written:
    """Read what earlier attempts wrote; nothing for a run that was not resumed."""
    resumed = Path(plan.resume_from)
    last = step_of(resumed)
    there = resumed.parent.iterdir() if last is not None else ()
    kept = [each for each in there if (step := step_of(each)) is not None and step <= last]  # as retention counts
    return Written(
        checkpoints=sum(_bytes_below(each) for each in kept),
        scaled=_bytes_below(Path(plan.uaq.folder)) if plan.uaq else 0,
    )


def _bytes_below(folder: Path) -> int:
    files = (Path(here) / name for here, _, names in os.walk(folder) for name in names)
    return sum(os.lstat(file).st_size for file in files if os.path.isfile(file))


def judge_disk(
    plan: RunPlan,
    disks: Disks,
    *,
    model_bytes: int,
    shape: ModelShape | None = None,
    written: Written,
    to_cache: int = 0,
) -> Iterator[Finding]:
    """Judge the room on the disks. model_bytes: of the weights in BF16, 0 when unknown.  shape: of the model, None
    where it is not known.  to_cache: of bytes_to_cache."""
    if (each := _checkpoint_bytes(plan, model_bytes=model_bytes, shape=shape)) > plan.guard.save_budget_s * _FAST:
        message = f"a run that is to stop has {plan.guard.save_budget_s:g} s to end its step and save {gib(each)}"
        remedy = f"a disk that takes 1 GB/s needs {each / _FAST:.0f} s for the save alone: raise it, and "
        remedy += "the grace period of the host"
        yield warning("save-budget", "guard.save_budget_s", message, remedy)
    in_run, in_checkpoints = needed_bytes(
        plan, model_bytes=model_bytes, shape=shape, written=written, to_cache=to_cache
    )
    if disks.are_one:
        more, needed = " more" if written != Written() else "", in_run + in_checkpoints
        message = f"the run needs about {gib(needed)}{more}"
        remedy = "free some space, or set cluster.run_dir to a roomier place"
        yield from _short("cluster.run_dir", disks.run, needed, message, remedy)
        return
    more = " more" if written.scaled else ""
    message = f"the run needs about {gib(in_run)}{more} besides its checkpoints"
    yield from _short("cluster.run_dir", disks.run, in_run, message, "free some space there")
    more = " more" if written.checkpoints else ""
    message = f"the checkpoints need about {gib(in_checkpoints)}{more}"
    remedy = "free some space there, or move them to a roomier disk, with a link in their place"
    yield from _short(str(Path(plan.run_dir) / FOLDER), disks.checkpoints, in_checkpoints, message, remedy)


def _short(place: str, disk: Disk, needed: int, message: str, remedy: str) -> Iterator[Finding]:
    if disk.free_bytes < needed:
        yield error("disk", place, f"{gib(disk.free_bytes)} free at {disk.folder}, {message}", remedy)


def needed_bytes(
    plan: RunPlan,
    *,
    model_bytes: int,
    shape: ModelShape | None = None,
    written: Written = Written(),
    to_cache: int = 0,
) -> tuple[int, int]:
    """Estimate the bytes that are still to be written: (to the run's folder and the cache beside it, to its
    checkpoints). Parameters as of judge_disk; without a shape an adapter counts as the whole model."""
    checkpoint = _checkpoint_bytes(plan, model_bytes=model_bytes, shape=shape)
    scaled = max(0, 2 * model_bytes - written.scaled) if plan.uaq else 0  # most of it in FP32
    run = _FOR_LOGS + scaled + 2 * model_bytes + to_cache  # `model/`, an earlier one goes to the logs
    return run, max(0, checkpoints_at_once(plan) * checkpoint - written.checkpoints)


def _checkpoint_bytes(plan: RunPlan, *, model_bytes: int, shape: ModelShape | None) -> int:
    weights = trained_weights(plan, shape) if plan.model.lora and shape and shape.is_dense else model_bytes // 2
    return weights * BYTES_SAVED_PER_WEIGHT if model_bytes else _TINY_CHECKPOINT


def bytes_in_bf16(shape: ModelShape | None, *, in_files: int) -> int:
    """Return the size of the weights in BF16: by the shape where that tells, for files may have them in FP32, as a
    run's `model/` does. in_files: 0 when they are not here."""
    return 2 * shape.weights if shape and shape.is_dense else in_files


def bytes_to_cache(plan: RunPlan, shape: ModelShape | None, *, in_files: int) -> int:
    """Return the size of a model that is made of a GGUF file or a package on first use, 0 where it is made already.
    shape, in_files: as of bytes_in_bf16."""
    return bytes_in_bf16(shape, in_files=0) if plan.weights.is_cached and not in_files else 0


def checkpoints_at_once(plan: RunPlan) -> int:
    """Count the most checkpoints on the disk at one time: an older one goes only when a newer one was verified. Where
    none goes, those by `every_minutes` are not counted: nobody knows how many there will be."""
    when, before_the_end = plan.checkpoint, plan.trainer.steps - 1
    saves = 1 + (before_the_end // when.every_steps if when.every_steps else 0)
    if when.keep is not None:
        saves = plan.trainer.steps if when.every_minutes or when.keep_best else saves
        return min(saves, when.keep + 1 + when.keep_best)
    if when.keep_best:  # each validation may be the best so far
        both = math.lcm(plan.trainer.validate_every, when.every_steps)
        saves += before_the_end // plan.trainer.validate_every - (before_the_end // both if both else 0)
    return saves


def bytes_of_a_save_by_time(plan: RunPlan, *, model_bytes: int, shape: ModelShape | None) -> int:
    """Return the bytes of each checkpoint that `checkpoints_at_once` does not count; 0 where it counts all. Parameters
    as of needed_bytes."""
    is_open = plan.checkpoint.keep is None and plan.checkpoint.every_minutes
    return _checkpoint_bytes(plan, model_bytes=model_bytes, shape=shape) if is_open else 0


def gib(size: int) -> str:
    """Format bytes as GiB, for people."""
    return f"{size / GIB:.1f} GiB"

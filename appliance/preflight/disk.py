"""Room on the disk: what a run writes there, less what its earlier attempts wrote and it goes on to use."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance.plan.host import HostFacts
from appliance.plan.model import RunPlan
from appliance.plan.shapes import ModelShape
from appliance.preflight.finding import Finding, Severity

_GIB = 1 << 30
_STEP = re.compile(r"global_step_([0-9]{1,18})")
_FOR_LOGS = _GIB // 4
_TINY_CHECKPOINT = _GIB // 8
BYTES_SAVED_PER_WEIGHT = 4 + 8 + 4  # FP32 weights, two Adam moments, the model to export in FP32


@dataclass(frozen=True)
class Written:
    """Of the run's folder, bytes. checkpoints: those that this attempt counts as its own; others are moved aside and
    stay.  scaled: the model that UAQ scaled."""

    checkpoints: int = 0
    scaled: int = 0


def read_written(plan: RunPlan) -> Written:
    """Nothing for a run that was not resumed."""
    resumed = Path(plan.resume_from) if plan.resume_from else None
    kept = [each for each in resumed.parent.iterdir() if _is_kept(each, resumed)] if resumed else []
    return Written(
        checkpoints=sum(_bytes_below(each) for each in kept),
        scaled=_bytes_below(Path(plan.uaq.folder)) if plan.uaq else 0,
    )


def _is_kept(folder: Path, resumed: Path) -> bool:
    """Whether a checkpoint is the one that is resumed, or an older one, which retention goes on to count."""
    its, last = _STEP.fullmatch(folder.name), _STEP.fullmatch(resumed.name)
    return its is not None and last is not None and int(its[1]) <= int(last[1])


def _bytes_below(folder: Path) -> int:
    files = (Path(here) / name for here, _, names in os.walk(folder) for name in names)
    return sum(os.lstat(file).st_size for file in files if os.path.isfile(file))


def judge_disk(plan: RunPlan, host: HostFacts, *, model_bytes: int, written: Written) -> Iterator[Finding]:
    """model_bytes: of the weights in BF16, 0 when unknown."""
    needed = disk_bytes(plan, model_bytes=model_bytes, written=written)
    if host.disk_free_bytes < needed:
        more = " more" if written != Written() else ""
        message = f"{gib(host.disk_free_bytes)} free at {plan.run_dir}, the run needs about {gib(needed)}{more}"
        remedy = "free some space, or set cluster.run_dir to a roomier place"
        yield Finding(Severity.ERROR, "disk", "cluster.run_dir", message, remedy)


def disk_bytes(plan: RunPlan, *, model_bytes: int, written: Written = Written()) -> int:
    """About what the run still writes. model_bytes: size of the weights on disk (BF16), 0 when unknown."""
    each = model_bytes // 2 * BYTES_SAVED_PER_WEIGHT if model_bytes else _TINY_CHECKPOINT
    checkpoints = max(0, checkpoints_at_once(plan) * each - written.checkpoints)
    scaled = max(0, 2 * model_bytes - written.scaled) if plan.uaq else 0  # most of it in FP32
    return _FOR_LOGS + checkpoints + scaled + 2 * model_bytes  # `model/`, an earlier one goes to the logs


def bytes_by_shape(shape: ModelShape | None) -> int:
    """Of the weights in BF16; 0 where the shape does not tell."""
    return 2 * shape.weights if shape and shape.is_dense else 0


def checkpoints_at_once(plan: RunPlan) -> int:
    """Most checkpoints on the disk at one time: an older one goes only when a newer one was verified."""
    when = plan.checkpoint
    saves = 1 + (plan.steps - 1) // when.every_steps if when.every_steps else 1
    if when.keep is None:
        return saves
    saves = plan.steps if when.every_minutes or when.keep_best else saves
    return min(saves, when.keep + 1 + when.keep_best)


def gib(size: int) -> str:
    """For people."""
    return f"{size / _GIB:.1f} GiB"

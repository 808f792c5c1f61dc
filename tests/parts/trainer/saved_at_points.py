"""`python saved_at_points.py FOLDER`: the trainer's own save of step 2, beside step 1, ended at each of its points.

A point is a file operation, as `file_operations.py` tells them. It ends by `kill`, SIGKILL at the point with a write
half done; and by `full`, a disk where from the point on nothing that needs room succeeds. Each end has a run folder
FOLDER/<how>/<number> and a process of its own. Prints a JSON line per end: [how, the point's operation, the exit code].
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import plans
from file_operations import NEED_ROOM, FileOperations

from appliance.errors import CheckpointError
from appliance.record.checkpoints import PROFILE_FOLDER
from appliance.terms.schemes import AS_PLANNED, Scheme
from appliance.trainer.checkpoints import Checkpoints
from appliance.trainer.metrics import append_metrics
from appliance.trainer.precision import PrecisionState

PASSED = 0  # the number of no point


class Points:
    """Counts the points of a save from where it is made, and ends the process at number `at`."""

    def __init__(self, run_dir: Path, *, at: int, how: str) -> None:
        self.reached: list[str] = []
        self._at, self._how = at, how
        self._lock = threading.Lock()  # files are hashed by several threads
        FileOperations(run_dir, self._reach)

    def _reach(self, operation: str, _: Path, *, half: Callable[[], object]) -> None:
        with self._lock:
            self.reached.append(operation)
            number = len(self.reached)
            if self._how == "kill" and number == self._at:
                half()
                os.kill(os.getpid(), signal.SIGKILL)
        if self._how == "full" and PASSED < self._at <= number and operation in NEED_ROOM:
            half()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_ranks(folder: Path, step: int) -> None:
    """In the place of verl's workers."""
    (folder / "actor").mkdir()
    for name in ("model", "optim"):
        (folder / "actor" / f"{name}_world_size_1_rank_0.pt").write_bytes(os.urandom(1000))


def save(run_dir: Path, step: int, *, at: int = PASSED, how: str = "") -> list[str]:
    """One step's end, with a point to end at where there is a `how`. Returns the points that it passed."""
    plan = plans.make_plan(run_dir).replace(checkpoint=plans.make_checkpoint(every_steps=1, keep=1))
    checkpoints = Checkpoints(plan, save_workers=write_ranks, data_state=lambda: {"position": step})
    line = append_metrics(run_dir, {"step": step, "time_s": 1.0})
    (run_dir / "guard.json").write_text(json.dumps({"step": step}))
    precision = PrecisionState("int8", AS_PLANNED, AS_PLANNED, Scheme.INT8, 0.0)
    points = Points(run_dir, at=at, how=how) if how else None
    checkpoints.end_step(line, precision=precision, is_last=False)
    return points.reached if points else []


def in_a_child(template: Path, run_dir: Path, *, at: int, how: str) -> int:
    """Exit code: 0, ENOSPC where the save failed, -9 where it was killed. The points go into a file beside the run."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        shutil.copytree(template, run_dir)
        run_dir.with_suffix(".points").write_text(json.dumps(save(run_dir, 2, at=at, how=how)))
        code = 0
    except (CheckpointError, OSError) as error:
        full = isinstance(error, CheckpointError) or error.errno == errno.ENOSPC
        code = errno.ENOSPC if full else 1
    finally:
        os._exit(code)


def main(root: Path) -> None:
    template = root / "template"
    template.mkdir(parents=True)
    (template / "metrics.jsonl").touch()
    (template / PROFILE_FOLDER).mkdir()
    (template / PROFILE_FOLDER / "profile.safetensors").write_bytes(os.urandom(1000))
    save(template, 1)
    if in_a_child(template, root / "0", at=PASSED, how="none"):
        sys.exit("the save fails by itself")
    points = json.loads((root / "0.points").read_text())
    for how in ("kill", "full"):
        for number, operation in enumerate(points, start=1):
            code = in_a_child(template, root / how / str(number), at=number, how=how)
            sys.stdout.write(json.dumps([how, operation, code]) + "\n")
            sys.stdout.flush()  # before a fork copies what waits


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""A child of a run that stands still: noticed by the launcher, cut, and named with what every process was doing."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from appliance.errors import ApplianceError, EngineError, TrainingError
from appliance.processes import find_processes
from appliance.record.events import append_event
from appliance.record.liveness import STACKS_FOLDER, dump_stacks, last_beat
from appliance.report import draw, summary
from appliance.terms.environment import RUN_VARIABLE

# The trainer waits for an engine in these.
_ENGINE_PHASES = frozenset({"load-engine", "restart-engines", "rollout", "validate"})


class Stalled(Exception):
    """Raised on the launcher's tick, which ends the child. error: how the run ends."""

    def __init__(self, error: ApplianceError) -> None:
        super().__init__(error.message)
        self.error = error


class StallWatch:
    """Progress is an event, a line of metrics or a heartbeat; the state of a process is not."""

    def __init__(self, *, stall_s: float, log_dir: Path, now: float) -> None:
        """stall_s: without progress, then it is cut.  log_dir: of the attempt.  now: s of any steady clock."""
        self._stall_s = stall_s
        self._log_dir = log_dir
        self._beat = last_beat(log_dir)
        self._moved_at = now

    def is_stalled(self, *, news: bool, now: float) -> bool:
        """news: whether an event or a line of metrics has come since the last call."""
        beat = last_beat(self._log_dir)
        if news or beat != self._beat:
            self._beat, self._moved_at = beat, now
        return now - self._moved_at >= self._stall_s


def ask_around(run_dir: Path, *, log_dir: Path, phase: str, stall_s: float) -> ApplianceError:
    """Have every process say what it is doing, and return the error that names it.

    EngineError where the trainer waits for an engine, else TrainingError.
    """
    living = {process.pid for process in find_processes(f"{RUN_VARIABLE}={run_dir}", below=os.getpid())}
    dumps = dump_stacks(log_dir, living=living)
    what = f"no progress for {draw.duration(stall_s)} in phase {phase}"
    with contextlib.suppress(OSError):  # a full disk: the error is told all the same
        append_event(run_dir, kind="stall", what=what, why="guard.stall_s", stacks=[path.name for path in dumps])
    folder = summary.typed_path(log_dir / STACKS_FOLDER)
    hint = f"what {len(dumps)} processes were doing is in {folder}; if they are only slow, raise guard.stall_s"
    kind = EngineError if phase in _ENGINE_PHASES else TrainingError
    return kind(f"{what}: cut", hint=hint if dumps else "no process said what it was doing: see the log")

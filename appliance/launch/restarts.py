"""A new attempt after a fault: a process that died, an engine that hung, an update that did not arrive.

Only from a checkpoint that verifies, and only while attempts get further: a training that fails twice at the same step
would fail there for ever. What a guard stopped, what the recipe or the host is to blame for, and a patch that does not
fit are no faults of this kind. Nor is one beside a signal: whoever stops a service may send it to all of its processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from appliance import console
from appliance.record.checkpoints import CheckpointSearch, find_newest, step_of
from appliance.record.events import append_event, may_restart
from appliance.record.session import asked_to_stop, cannot_write


def keep_going(code: int, *, run_dir: Path, max_restarts: int, again: Callable[[CheckpointSearch], int]) -> int:
    """Start the run again after faults. Returns the last exit code.

    code: of the first attempt.  again: resumes the run from what was found, every byte of which was read just now, and
    returns its exit code; raises as it does.  Raises PreflightError when the run's folder cannot be written.
    """
    reached = -1
    for number in range(1, max_restarts + 1):
        if not may_restart(run_dir, code=code):
            return code
        if signal := asked_to_stop(run_dir):
            console.say(f"not restarted: stopped by {signal}")
            return code
        found = find_newest(run_dir)
        step = -1 if found.newest is None else step_of(found.newest) or 0
        if step <= reached:
            why = (
                "there is no whole checkpoint" if found.newest is None else f"it got no further than step {step} again"
            )
            console.say(f"not restarted: {why}")
            return code
        reached = step
        what = f"restart {number} of {max_restarts}, from the state after step {step}"
        try:
            append_event(run_dir, kind="restart", what=what, why="trainer.max_restarts", step=step)
        except OSError as error:
            raise cannot_write(run_dir, error) from error
        console.say(what)
        code = again(found)
    return code

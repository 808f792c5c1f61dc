"""One child that is not a training: a benchmark, a check of an engine. Its output goes to a log, its end is ours."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from appliance import console
from appliance.errors import ApplianceError, EngineError, Interrupted, error_class
from appliance.processes import module_argv
from appliance.record.events import first_failure
from appliance.record.plan import RunPlan
from appliance.signals import handled
from appliance.tasks.prepare import is_prepared

_LOOK_EVERY_S = 0.2


def make_inputs(plan: RunPlan, *, command: str) -> None:
    """Model and data of the recipe, made as `train` makes them if the cache lacks them. Raises as `run_child` does."""
    if is_prepared(plan):
        return
    console.say("making the recipe's model and data (kept for later)")
    plan_file = Path(plan.run_dir) / "plan.json"
    plan.write(plan_file)
    run_child(
        ["appliance.tasks.prepare", str(plan_file)], command=command, folder=Path(plan.run_dir), env=dict(plan.env)
    )


def run_child(
    module: list[str], *, command: str, folder: Path, env: dict[str, str], tick: Callable[[], None] = lambda: None
) -> None:
    """Run a module of ours with its arguments; `tick` is called while it runs and once after.

    command: the name of ours that people typed.  folder: of the work, removed by the caller.
    When the child ends with another code than 0: raises the error of ours that it left as an event in the folder, else
    EngineError that names the log, which is then kept beside the folder.
    """
    log = folder / "child.log"
    code = _run(module, log=log, env=env, tick=tick)
    if code:
        failure = first_failure(folder)
        is_told = failure is not None and failure.exit_code not in (None, ApplianceError.exit_code)
        if is_told and failure.hint:
            raise (error_class(failure.error) or EngineError).retold(failure.what, hint=failure.hint)
        kept = _keep(log, beside=folder, command=command)
        if is_told:
            raise (error_class(failure.error) or EngineError).retold(failure.what, hint=f"its log: {kept}")
        message = failure.what if failure else f"{command}: {module[0]} ended with code {code}"
        raise EngineError(message, hint=f"its log: {kept}")


def _keep(log: Path, *, beside: Path, command: str) -> Path:
    """The log where it stays, in the place of the last failure's; under a name of its own where that one must stay."""
    kept = beside.parent / f"{command}-failed.log"
    try:
        return log.replace(kept)
    except OSError:  # another user's in a folder of many users, or a folder of that name
        descriptor, own = tempfile.mkstemp(prefix=f"{command}-failed-", suffix=".log", dir=beside.parent)
        os.close(descriptor)
        return log.replace(own)


def _run(module: list[str], *, log: Path, env: dict[str, str], tick: Callable[[], None]) -> int:
    with log.open("wb") as out, handled(_end, numbers=(signal.SIGTERM,)):
        process = subprocess.Popen(
            module_argv(*module),
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | env,
            start_new_session=True,  # a group of its own: an engine may have processes of its own
        )
        try:
            while process.poll() is None:
                time.sleep(_LOOK_EVERY_S)
                tick()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    tick()
    return process.returncode


def _end(number: int, frame: FrameType | None) -> None:
    raise Interrupted("stopped by SIGTERM")  # what was begun is cleaned up, as it is after Ctrl-C

"""A signal that ends the reader of a run as well, as Ctrl-C does in `| tee`: the state is saved all the same."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.record.session import RunStatus, read_record

# It has finished three steps, of which none is saved, and takes longer to save them than a tick of its launcher.
HEARING = """
import os, sys, time
from pathlib import Path
from appliance.record.events import append_event
from appliance.trainer.stopping import StopAsked, Stopping
run_dir = Path(os.environ["APPLIANCE_PLAN"]).parent
append_event(run_dir, kind="phase", what="rollout")
stopping = Stopping(run_dir)
stopping.begin_change()
stopping.end_step(3, saved=0)
(run_dir / "ready").touch()
try:
    while True:
        time.sleep(0.05)
        stopping.check()
except StopAsked:
    append_event(run_dir, kind="phase", what="save")
    time.sleep(1.0)
    stopping.note_saved(3)
    sys.exit(stopping.leave().exit_code)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_the_state_is_saved_though_nobody_reads(
    tmp_path: Path,
    small_plan: Callable,
    python: Callable,
    launch: Callable,
    wait_until: Callable,
    stream: str,
    number: signal.Signals,
    code: int,
) -> None:
    plan = small_plan(tmp_path, argv=python(HEARING))
    run_dir, process = Path(plan.run_dir), launch(plan, *(["--json"] if stream == "stdout" else []))
    wait_until((run_dir / "ready").exists, seconds=60.0)
    getattr(process, stream).close()
    process.send_signal(number)
    assert process.wait(timeout=60) == code
    record = read_record(run_dir)
    assert (record.state, record.exit_code) == (RunStatus.STOPPED, code)
    assert record.reason == f"stopped by {number.name}, the state after step 3 is saved"

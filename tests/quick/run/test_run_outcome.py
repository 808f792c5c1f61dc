"""How the end of a child becomes the end of a run."""

from __future__ import annotations

from dataclasses import replace

from appliance.launch.outcome import Child, Outcome, failed
from appliance.record.events import Event
from appliance.record.session import RunStatus
from appliance.record.state import RunState

CHILD = Child("train", "training", (), default_code=5)
STOP = Event(
    1.0,
    "failure",
    "stopped by the guard: step 2: warn -> stop: k3_kl 0.02 above 0.015 (1 step in a row)",
    error="GuardStop",
    hint="the state after this step is in runs/a/checkpoints/global_step_2",
    exit_code=6,
)


def ended(failure: Event) -> Outcome:
    state = RunState(steps=4, phase="save", failure=failure)
    return failed(CHILD, returncode=6, state=state, log_tail="noise", log="runs/a/logs/1/train.log", run="runs/a")


def test_a_stop_by_the_guard_is_no_failure() -> None:
    assert ended(STOP) == Outcome(
        RunStatus.STOPPED,
        exit_code=6,
        reason=STOP.what,
        advice=(STOP.what, f"hint: {STOP.hint}", "next: appliance logs runs/a"),
    )


def test_a_number_that_must_be_finite_still_fails_the_run() -> None:
    outcome = ended(replace(STOP, error="NumericsError"))
    assert (outcome.state, outcome.exit_code) == (RunStatus.FAILED, 6)

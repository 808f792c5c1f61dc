"""SIGTERM and Ctrl-C in every phase of a real training: it saves what there is, says so, and leaves no process.

`make torture ARGS="-k signals"`.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable

import pytest
from killable import Run, Terminal

from appliance.record.checkpoints import checkpoint_folder, damage

pytestmark = pytest.mark.torture

EARLY = ("prepare", "profile", "import", "start", "load-model", "attest")  # nothing of a new run can be saved yet
SIGNALS = {signal.SIGTERM: 75, signal.SIGINT: 130}  # and the exit code where the state was saved
LATE = ("rollout", "log-probs", "update", "sync", "validate", "save")


def phases(run: Run) -> list[str]:
    return [event["what"] for event in run.events("phase")]


def stop_in(run: Run, phase: str, name: signal.Signals = signal.SIGTERM) -> int:
    """A signal as soon as the phase is there; the exit code."""
    seen = phases(run).count(phase)
    assert run.wait_for(lambda: phases(run).count(phase) > seen), run.log_text[-3000:]
    run.stop(name)
    return run.end(seconds=400)


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("phase", EARLY)
def test_before_the_first_step_there_is_nothing_to_save(
    phase: str, name: signal.Signals, new_run: Callable[..., Run]
) -> None:
    # A seed of its own has problems of its own, which the cache lacks: each phase is really there.
    run = new_run(
        f"early-{phase}-{name.name}",
        trainer__steps="3",
        task__seed=str(time.time_ns() % 10**9),
        quantization__smoothing="0.4",
    )
    run.start()
    assert stop_in(run, phase, name) == 130, run.log_text[-3000:]
    assert run.record()["reason"] == f"stopped by {name.name}, there was nothing to save"
    assert run.record()["state"] == "stopped"
    assert run.processes() == []


def test_in_a_step_the_last_finished_one_is_saved(new_run: Callable[..., Run]) -> None:
    """One run, stopped in each phase of its steps and resumed after each stop. Without the setting it has no phase
    `log-probs`."""
    often = {"checkpoint__every_steps": "7", "trainer__validate_every": "1"}
    run = new_run("late", trainer__steps="60", trainer__old_log_probs="recompute", **often)
    for phase, name in itertools.product(LATE, SIGNALS):
        run.start()
        done = len(run.steps)
        assert run.wait_for(lambda done=done: len(run.steps) > done), run.log_text[-3000:]
        assert stop_in(run, phase, name) == SIGNALS[name], f"{phase}: {run.log_text[-3000:]}"
        step = run.steps[-1]
        assert run.record()["reason"] == f"stopped by {name.name}, the state after step {step} is saved", phase
        assert damage(checkpoint_folder(run.run_dir, step=step)) == [], phase
        assert run.processes() == [], phase
        assert run.steps == list(range(1, step + 1)), phase


def test_a_final_validation_that_was_cut_is_made_by_the_next_attempt(new_run: Callable[..., Run]) -> None:
    run = new_run("final", trainer__steps="2", trainer__validate_every="2", task__val_size="512")  # takes seconds
    run.start()
    assert stop_in(run, "validate") == 75, run.log_text[-3000:]
    assert run.steps == [1, 2] and "val_reward_mean" not in run.lines("metrics.jsonl")[-1]
    run.start()
    assert run.end() == 0, run.log_text[-3000:]
    first, last = run.lines("metrics.jsonl")
    assert (first["step"], last["step"], last["val_samples"]) == (1, 2, int(run.sets["task.val_size"]))
    assert 0 <= last["val_reward_mean"] <= 1 and 0 <= last["val_reward_bf16_mean"] <= 1
    assert (run.run_dir / "model" / "config.json").is_file()


def test_a_save_that_takes_longer_than_it_may_is_ended(new_run: Callable[..., Run]) -> None:
    """The older checkpoint is whole, and the next attempt goes on from it."""
    run = new_run("budget", trainer__steps="14", checkpoint__every_steps="5", guard__save_budget_s="0.1")
    run.start()
    assert run.wait_for(lambda: len(run.steps) > 5), run.log_text[-3000:]  # 5 is saved, and 4 more are not
    assert stop_in(run, "rollout") == 130, run.log_text[-3000:]
    said = "stopped by SIGTERM, and the state was not saved in time; what was not saved before is lost"
    assert run.record()["reason"] == said
    assert run.steps[-1] < 10 and damage(checkpoint_folder(run.run_dir, step=5)) == []
    assert run.processes() == []
    run.start()
    assert run.end() == 0, run.log_text[-3000:]
    assert [event["what"] for event in run.events("resume")] == ["attempt 2 resumes after step 5"]
    assert run.steps == list(range(1, 15)) and run.damaged_files() == []
    assert run.processes() == []


def test_a_terminal_that_is_closed_saves_and_stops(new_run: Callable[..., Run]) -> None:
    """SIGHUP, and from then on nothing can be written to stdout and stderr."""
    run = new_run("closed", trainer__steps="200", checkpoint__every_steps="0")
    terminal = Terminal()
    try:
        run.start_on(terminal)
        assert run.wait_for(lambda: len(run.steps) > 2, seconds=300)
    finally:
        terminal.close()
    assert run.end() == 75
    step = run.steps[-1]
    assert run.record()["reason"] == f"stopped by SIGHUP, the state after step {step} is saved"
    assert damage(checkpoint_folder(run.run_dir, step=step)) == []
    assert run.processes() == []


def test_ctrl_c_twice_stops_at_once(new_run: Callable[..., Run]) -> None:
    run = new_run("twice", trainer__steps="30", checkpoint__every_steps="0")
    run.start()
    assert run.wait_for(lambda: run.steps), run.log_text[-3000:]
    run.stop(signal.SIGINT)
    time.sleep(0.5)
    run.stop(signal.SIGINT)
    asked_at = time.monotonic()
    assert run.end() == 130
    assert time.monotonic() - asked_at < 15
    assert run.processes() == []

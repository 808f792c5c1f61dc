"""Deaths in a real training: each is named, the launcher goes on from the newest checkpoint, and the run ends as one
that nobody disturbed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from killable import Run
from trainings import SHORT, STEPS, Finished

pytestmark = [pytest.mark.e2e(minutes=4), pytest.mark.long]

NAMED_WITHIN_S = 60.0
OF_A_CLOCK = ("_s", "_per_s")


@pytest.fixture(scope="module")
def killed(short_root: Path, short: Finished) -> Iterator[Run]:
    """The run `short` again, every step of it saved; each test goes on where the one before left it."""
    sets = dict(pair.split("=", maxsplit=1) for pair in SHORT)
    run = Run(short_root, "killed", {**sets, "checkpoint.every_steps": "1", "trainer.max_restarts": "2"})
    run.start()
    yield run
    run.clean_up()


def kill_after_a_step(run: Run, victim: str, *, attempt: int) -> dict[str, Any]:
    """Kill it in this attempt, once a step of it is finished and saved. Returns the failure that names it, with the
    seconds that took."""

    def finished_a_step() -> bool:
        """The newest checkpoint is one that this attempt made."""
        begun = [event["time"] for event in run.events("resume")] or [0.0]
        saved = [event for event in run.events("checkpoint") if event.get("step") and event["time"] > begun[-1]]
        return bool(saved) and run.record()["attempt"] == attempt

    assert run.wait_for(finished_a_step), run.log_text[-3000:]
    killed_at = time.time()
    run.kill(victim)
    assert run.wait_for(lambda: len(run.events("failure")) == attempt), run.log_text[-3000:]
    failure = run.events("failure")[-1]
    return {**failure, "seconds": failure["time"] - killed_at}


def test_killed_engine_and_worker_are_named_and_the_run_goes_on(killed: Run) -> None:
    """The engine's core after the first step, the training worker after the next: three attempts, each step once."""
    run = killed
    first = kill_after_a_step(run, "VLLM::EngineCor", attempt=1)
    second = kill_after_a_step(run, "ray::WorkerDict", attempt=2)
    assert run.end() == 0, run.log_text[-3000:]
    assert (first["error"], first["exit_code"]) == ("EngineError", 4)
    assert first["what"] == "rollout engine 0 died: its core process is gone"
    assert (second["error"], second["exit_code"]) == ("ProcessDied", 5)
    assert second["what"].startswith(("a training worker died: WorkerDict, process ", "a worker died: "))
    assert max(first["seconds"], second["seconds"]) < NAMED_WITHIN_S
    assert run.steps == list(range(STEPS + 1))
    assert run.damaged_files() == []
    assert (run.record()["state"], run.record()["attempt"]) == ("done", 3)
    assert run.processes() == []


def without_times(line: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics without what a clock says."""
    return {key: value for key, value in line.items() if not key.endswith(OF_A_CLOCK)}


def test_a_run_that_was_killed_twice_ends_as_one_that_was_not(killed: Run, short: Finished) -> None:
    """Every metric of every step, value for value: the same prompts, the same tokens, the same updates. And the
    weights, byte for byte."""
    assert killed.record()["state"] == "done"
    once, thrice = short.json_lines("metrics.jsonl"), killed.lines("metrics.jsonl")
    assert [without_times(line) for line in thrice] == [without_times(line) for line in once]
    weights = "model/model.safetensors"
    assert (killed.run_dir / weights).read_bytes() == (short.run_dir / weights).read_bytes()


def test_a_run_that_is_done_says_so(killed: Run) -> None:
    done = subprocess.run(killed.command(), capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, f"the run killed is done: {killed.run_dir / 'model'}\n")

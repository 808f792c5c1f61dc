"""Deaths in a real training: each is named, and the launcher goes on from the newest checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from killable import Run

pytestmark = pytest.mark.e2e

NAMED_WITHIN_S = 60.0


def kill_after_a_step(run: Run, victim: str, *, attempt: int) -> dict[str, Any]:
    """Kill it in this attempt, once a step of it is finished and saved. Returns the failure that names it, with the
    seconds that took."""

    def finished_a_step() -> bool:
        """The newest checkpoint is one that this attempt made."""
        begun = [event["time"] for event in run.events("resume")] or [0.0]
        saved = [event for event in run.events("checkpoint") if event.get("step") and event["time"] > begun[-1]]
        return bool(saved) and run.record()["attempt"] == attempt

    assert run.wait_for(finished_a_step), run.said[-3000:]
    killed_at = time.time()
    run.kill(victim)
    assert run.wait_for(lambda: len(run.events("failure")) == attempt), run.said[-3000:]
    failure = run.events("failure")[-1]
    return {**failure, "seconds": failure["time"] - killed_at}


def test_killed_engine_and_worker_are_named_and_the_run_goes_on(new_run: Callable[..., Run]) -> None:
    """The engine's core after the first step, the training worker after the next: three attempts, each step once."""
    run = new_run("restarts", trainer__steps="4", trainer__max_restarts="2")
    run.start()
    first = kill_after_a_step(run, "VLLM::EngineCor", attempt=1)
    second = kill_after_a_step(run, "ray::WorkerDict", attempt=2)
    assert run.end() == 0, run.said[-3000:]
    assert (first["why"], first["exit_code"]) == ("EngineError", 4)
    assert first["what"] in (  # the watch, or what was under way in the engine: whoever is first
        "rollout engine 0 died: its core process is gone",
        "a rollout engine died: its core process is gone",
    )
    assert (second["why"], second["exit_code"]) == ("ProcessDied", 5)
    assert second["what"].startswith(("a training worker died: WorkerDict, process ", "a worker died: "))
    assert max(first["seconds"], second["seconds"]) < NAMED_WITHIN_S
    assert run.steps == [1, 2, 3, 4]
    assert run.damaged_files() == []
    assert (run.run_dir / "model" / "config.json").is_file()
    assert (run.record()["state"], run.record()["attempt"]) == ("done", 3)
    assert run.processes() == []

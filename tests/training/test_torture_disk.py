"""A real training whose disk fills up in the middle of a save: `make torture`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killable import SMALL, Run

from appliance.record.checkpoints import checkpoint_folder, damage

pytestmark = pytest.mark.torture

STEPS = 6
ROOM_FOR_HALF = 30 << 20  # a checkpoint has 48 MB; the rest is for saying what happened


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Of a file to which a full disk may have done something."""
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def test_a_disk_that_fills_up_in_a_save_costs_that_save(tiny_cache: Path, disk_of: Callable[[str], Path]) -> None:
    """The step before is whole, the end is said, and with room again the run goes on to its end."""
    disk = disk_of("4g")
    shutil.copytree(tiny_cache, disk / tiny_cache.name)
    run = Run(disk, "full", {**SMALL, "trainer.steps": str(STEPS), "trainer.max_restarts": "3"})
    run.start()
    try:
        assert run.wait_for(lambda: run.events("checkpoint")), run.log_text[-3000:]
        disk_of(str(shutil.disk_usage(disk).used + ROOM_FOR_HALF))
        assert run.end() == 5, run.log_text[-3000:]
        (failure,) = [event for event in whole_lines(run.run_dir / "events.jsonl") if event["kind"] == "failure"]
        assert failure["error"] == "CheckpointError" and "no space left at" in failure["what"]
        assert failure["what"] in run.log_text
        step = run.events("checkpoint")[-1]["step"]
        assert damage(checkpoint_folder(run.run_dir, step=step)) == [] and run.damaged_files() == []
        assert failure["hint"].endswith(f"global_step_{step} is whole")
        assert run.processes() == []
        run.start()  # there is still no room: said before anything is moved
        assert run.end() == 3, run.log_text[-3000:]
        assert damage(checkpoint_folder(run.run_dir, step=step)) == []
        disk_of("4g")
        run.start()
        assert run.end() == 0, run.log_text[-3000:]
        assert run.steps == list(range(1, STEPS + 1)) and run.damaged_files() == []
    finally:
        run.clean_up()

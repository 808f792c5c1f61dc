"""What the tests of faults look with: it sees what it is there to see."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from killable import Run, named_after

from appliance.record.checkpoints import DAMAGED, Facts, checkpoint_folder, partial_of, seal, set_aside
from appliance.record.events import append_event


def save(run: Run, step: int) -> Path:
    folder = checkpoint_folder(run.run_dir, step=step)
    folder.mkdir(parents=True)
    (folder / "data.pt").write_bytes(b"position")
    seal(folder, facts=Facts(step=step, world_size=1, reason="", time=0.0))
    return folder


def test_a_damaged_checkpoint_is_seen_where_it_is_and_where_a_resume_put_it(tmp_path: Path) -> None:
    run = Run(tmp_path, "run", {})
    folder = save(run, 1)
    half = partial_of(checkpoint_folder(run.run_dir, step=2))
    half.mkdir()
    set_aside(half, below=DAMAGED)  # a kill in a save leaves that, and nothing is lost by it
    assert run.damaged_files() == []
    (folder / "data.pt").write_bytes(b"positiom")
    assert run.damaged_files() == ["global_step_1: data.pt has other content than was saved"]
    set_aside(folder, below=DAMAGED)
    assert run.damaged_files() == ["global_step_1 is set aside"]
    append_event(run.run_dir, kind="checkpoint", what="global_step_1 is damaged and set aside")
    assert run.damaged_files()[1:] == ["global_step_1 is damaged and set aside"]


def test_a_process_is_found_by_a_word_of_its_command(tmp_path: Path) -> None:
    """Not by a part of one: the subreaper has the trainer's whole command in one of its own words."""
    code = "import time; time.sleep(100)"
    started = [subprocess.Popen([sys.executable, "-c", code, word]) for word in ("the.trainer", '["the.trainer"]')]
    try:
        run = Run(tmp_path, "run", {}, since=frozenset())
        while len(run.by_command(code)) < 2:  # until both are what they will be
            time.sleep(0.05)
        assert [each.pid for each in run.by_command("the.trainer")] == [started[0].pid]
        assert run.kill("the.trainer").pid == started[0].pid and started[0].wait() == -signal.SIGKILL
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_failure_is_counted_from_the_kill_before_it() -> None:
    failures = [{"time": 105.0}, {"time": 270.0}]
    assert named_after(failures, killed_at=[100.0, 200.0, 300.0]) == [5.0, 70.0]
    assert named_after([], killed_at=[]) == []
    with pytest.raises(AssertionError):
        named_after(failures, killed_at=[106.0])
    with pytest.raises(AssertionError):
        named_after(failures, killed_at=[])

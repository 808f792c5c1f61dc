"""A disk that is full when a run or its next attempt begins. The disk is real, and small."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from stopped_runs import resumed, save, steps_in, stopped

from appliance import console
from appliance.errors import PreflightError
from appliance.launch.resume import begin_attempt
from appliance.launch.train import _host_is_to_blame
from appliance.record.checkpoints import find_newest
from appliance.record.events import append_event, append_line
from appliance.record.session import create_session, read_record

HINT = "free some space, or set cluster.run_dir to a roomier place"


def fill(disk: Path) -> Path:
    """To the last byte. Returns the file to remove for room."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            return filler


def test_a_run_that_cannot_be_written_leaves_no_folder(disk_of: Callable[[str], Path], small_plan: Callable) -> None:
    disk = disk_of("1m")
    plan = small_plan(disk)
    filler = fill(disk)
    with pytest.raises(PreflightError) as caught:
        create_session(plan, recipe_yaml="name: small\n", is_chosen=False)
    assert (caught.value.message, caught.value.hint) == (f"{plan.run_dir}: no space left", HINT)
    assert not Path(plan.run_dir).exists()
    filler.unlink()
    create_session(plan, recipe_yaml="name: small\n", is_chosen=False).release()


def test_an_attempt_that_cannot_begin_leaves_the_run_as_it_was(
    disk_of: Callable[[str], Path], small_plan: Callable
) -> None:
    disk = disk_of("1m")
    plan = small_plan(disk, steps=9)
    run_dir = stopped(plan)
    folder = save(run_dir, 3)
    filler = fill(disk)
    with pytest.raises(PreflightError) as caught:
        begin_attempt(plan, resume=resumed(run_dir), recipe_yaml="name: small\n")
    assert (caught.value.message, caught.value.hint) == (f"{run_dir}: no space left", HINT)
    assert find_newest(run_dir).newest == folder and read_record(run_dir).attempt == 1
    filler.unlink()
    begin_attempt(plan, resume=resumed(run_dir), recipe_yaml="name: small\n").release()
    assert read_record(run_dir).attempt == 2 and steps_in(run_dir / "metrics.jsonl") == [0, 1, 2, 3]


def test_a_write_that_names_no_file_is_the_hosts_fault(disk_of: Callable[[str], Path]) -> None:
    """But for stdout's, which has words of its own."""
    disk = disk_of("1m")
    fill(disk)
    with pytest.raises(PreflightError) as caught, _host_is_to_blame(disk):
        append_event(disk, kind="note", what="heard")
    assert (caught.value.message, caught.value.hint) == (f"{disk}: no space left", HINT)
    with pytest.raises(console.StdoutError), _host_is_to_blame(disk):
        raise console.StdoutError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_line_that_only_begins_to_fit_is_an_error(disk_of: Callable[[str], Path]) -> None:
    """The kernel writes the part that fits, and no error; the next line then begins behind half a line."""
    disk = disk_of("1m")
    path = disk / "events.jsonl"
    append_line(path, {"first": 1})
    filler = fill(disk)
    with pytest.raises(OSError, match="No space left on device"):
        append_line(path, {"long": "x" * (1 << 16)})
    assert os.stat(path).st_size > 1000
    filler.unlink()
    append_event(disk, kind="note", what="heard again")
    assert [line[:8] for line in path.read_text().splitlines()] == ['{"first"', '{"long":', '{"time":']

"""The trainer killed, or failed by its disk, at every file operation of its save: what is there afterwards is the older
checkpoint, or the newer one, always whole. `saved_at_points.py` beside this file does it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from file_operations import OPERATIONS

from appliance.record.checkpoints import damage, find_newest, half_done, in_order

HERE = Path(__file__).parent
Ends = dict[str, list[tuple[str, int]]]  # by how: (operation, exit code) of each point, in their order


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("points") / "root"


@pytest.fixture(scope="module")
def ends(root: Path) -> Ends:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE.parents[1]), os.environ.get("PYTHONPATH")))),
    }
    command = [sys.executable, str(HERE / "saved_at_points.py"), str(root)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    points: Ends = {"kill": [], "full": []}
    for how, operation, code in map(json.loads, done.stdout.splitlines()):
        points[how].append((operation, code))
    return points


@pytest.mark.parametrize(("how", "code"), [("kill", -signal.SIGKILL), ("full", errno.ENOSPC)])
def test_at_every_file_operation_of_a_save_a_whole_checkpoint_is_there(
    root: Path, ends: Ends, how: str, code: int
) -> None:
    assert {operation for operation, _ in ends[how]} == OPERATIONS
    assert {ended for _, ended in ends[how]} == {code}  # on a full disk the last word, that it is saved, fails too
    newest: Counter[str] = Counter()
    half_written = 0
    for number, (operation, _) in enumerate(ends[how], start=1):
        run_dir = root / how / str(number)
        look = find_newest(run_dir)
        assert look.newest is not None and look.rejected == (), (number, operation, look)
        assert [damage(folder) for folder in in_order(run_dir)] == [[]] * len(in_order(run_dir)), (number, operation)
        newest[look.newest.name] += 1
        half_written += any(each.name == "partial-global_step_2" for each in half_done(run_dir))
    assert newest.keys() == {"global_step_1", "global_step_2"} and min(newest.values()) > 5, newest
    assert half_written > 20 if how == "kill" else half_written == 0  # it is removed, to leave room for saying so

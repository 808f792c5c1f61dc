"""A process killed, or failed by its disk, at every single file operation of a save: what is there afterwards is the
older checkpoint, or the newer one, always whole. Python's audit events are the layer at which it happens: they come
before each opening, renaming, making and removing, of `os`, `pathlib` and `shutil` alike."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.run.checkpoints import find_newest, half_done, in_order

# Saves step 2 beside step 1 as trainer/checkpoints.py does, and keeps one. At operation number `at` it dies, or every
# operation from there on fails with "no space left".
SAVE = """
import errno, os, sys
from pathlib import Path
from appliance.run.checkpoints import checkpoint_folder, partial_of, put_in_place, remove_surplus
from appliance.run.seal import Facts, damage, seal

run_dir, step, at, how = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
operations = 0
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT

def watch(event, arguments):
    global operations
    if event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"):
        return
    if not str(arguments[0]).startswith(str(run_dir)) and not isinstance(arguments[0], int) and event != "os.rmdir":
        return
    if event == "open" and not (isinstance(arguments[2], int)):
        return
    operations += 1
    if how == "kill" and operations == at:
        os.kill(os.getpid(), 9)
    if how == "full" and operations >= at and event in ("open", "os.mkdir", "os.rename"):
        if event != "open" or arguments[2] & WRITING:
            raise OSError(errno.ENOSPC, "No space left on device")

def save():
    folder = checkpoint_folder(run_dir, step=step)
    partial = partial_of(folder)
    (partial / "actor").mkdir(parents=True)
    for name in ("actor/model.pt", "actor/optim.pt", "data.pt", "state.json"):
        (partial / name).write_bytes(os.urandom(1000))
    seal(partial, facts=Facts(step=step, world_size=1, reason="", time=0.0))
    put_in_place(partial, folder=folder)
    assert damage(folder) == []
    remove_surplus(run_dir, keep=1, keep_best=False)

sys.addaudithook(watch)
try:
    save()
except OSError as error:
    sys.exit(28)
print(operations)
"""


def run(run_dir: Path, *, step: int, at: int, how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SAVE, str(run_dir), str(step), str(at), how], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("how", ["kill", "full"])
def test_at_every_file_operation_of_a_save_a_whole_checkpoint_is_there(tmp_path: Path, how: str) -> None:
    count = int(run(tmp_path / "all", step=1, at=0, how="none").stdout)
    assert count == 28
    found: dict[str, int] = {}
    older = newer = 0
    for at in range(1, 2 * count):
        run_dir = tmp_path / f"{how}-{at}"
        assert run(run_dir, step=1, at=0, how="none").returncode == 0
        ended = run(run_dir, step=2, at=at, how=how)
        if ended.returncode == 0:  # past the last operation
            break
        assert ended.returncode in (-9, errno.ENOSPC), ended.stderr
        look = find_newest(run_dir)
        assert look.newest is not None and look.rejected == (), (at, look)
        older += look.newest.name == "global_step_1"
        newer += look.newest.name == "global_step_2"
        for left in (*in_order(run_dir), *half_done(run_dir)):
            found[left.name] = found.get(left.name, 0) + 1
    assert ended.returncode == 0 and older + newer >= (count if how == "kill" else 26)  # reading needs no space
    assert older > 10 and newer >= (1 if how == "kill" else 0), (older, newer)
    assert "partial-global_step_2" in found

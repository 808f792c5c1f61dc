"""A run's folder that cannot be written any more while the run goes on: the host's fault, in words and by its code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.errors import PreflightError

HINT = "hint: set cluster.run_dir to a folder that you can write to"
# Rights bind no superuser; one who gave that up they bind.
BOUND = ("setpriv", "--bounding-set=-dac_override") if os.getuid() == 0 else ()
LAUNCHER = """
import sys
from pathlib import Path
from appliance import cli
from appliance.record.plan import read_plan
from appliance.launch.train import run_training
plan = read_plan(Path(sys.argv[1]))
cli.app = lambda: sys.exit(run_training(plan, recipe_yaml="", findings=(), name="small", json_mode=False))
cli.main()
"""
CLOSE = """
import os, signal, sys, time
from pathlib import Path
run_dir = Path(os.environ['APPLIANCE_PLAN']).parent
run_dir.chmod(0o555)
"""


def train(small_plan: Callable, root: Path, code: str) -> tuple[Path, int, list[str]]:
    """code: of the child, which has just closed the run's folder. Returns that folder, the exit code and stderr."""
    plan = small_plan(root, argv=(sys.executable, "-c", CLOSE + code))
    plan.write(root / "plan.json")
    process = subprocess.run(
        [*BOUND, sys.executable, "-c", LAUNCHER, str(root / "plan.json")],
        env={**os.environ, "TERM": "dumb", "TMPDIR": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    Path(plan.run_dir).chmod(0o755)
    assert not list(root.glob("appliance-error-*")), process.stderr
    return Path(plan.run_dir), process.returncode, process.stderr.splitlines()


@pytest.mark.slow
def test_a_child_that_cannot_write_fails_as_the_host_had_it(small_plan: Callable, tmp_path: Path) -> None:
    run_dir, code, lines = train(small_plan, tmp_path, "(run_dir / 'checkpoints').mkdir()")
    assert code == 5
    error_lines = lines[next(i for i, line in enumerate(lines) if line.startswith("error: ")) :]
    assert error_lines[0] == "error: training failed in phase starting: a file or folder cannot be written or read"
    assert error_lines[1] == "hint: let this user write there, and in cluster.run_dir until the run ends"
    assert error_lines[-2:] == [f"error: {run_dir}: cannot be written: run.json does not say how the run ended", HINT]
    assert not list(run_dir.glob(".run.json*"))


@pytest.mark.slow
def test_a_run_that_is_done_but_cannot_say_so_is_not_our_fault(small_plan: Callable, tmp_path: Path) -> None:
    code = """
run_dir.chmod(0o755)
(run_dir / 'model').mkdir()
(run_dir / 'model/config.json').write_text('{}')
run_dir.chmod(0o555)
"""
    run_dir, ended, lines = train(small_plan, tmp_path, code)
    assert ended == PreflightError.exit_code
    assert lines[-2:] == [f"error: {run_dir}: cannot be written: run.json does not say how the run ended", HINT]
    assert json.loads((run_dir / "run.json").read_text())["state"] in ("starting", "running")


@pytest.mark.slow
def test_a_run_that_cannot_be_asked_to_stop_ends_all_the_same(small_plan: Callable, tmp_path: Path) -> None:
    """The child's parent is the subreaper, and its parent the launcher."""
    code = """
stat = Path(f'/proc/{os.getppid()}/stat').read_text()
os.kill(int(stat.rpartition(') ')[2].split()[1]), signal.SIGTERM)
time.sleep(60)
"""
    run_dir, ended, lines = train(small_plan, tmp_path, code)
    assert ended == 130 and any("stopped by SIGTERM, and the state was not saved in time" in line for line in lines)
    assert f"error: {run_dir}: cannot be written: run.json does not say how the run ended" in lines

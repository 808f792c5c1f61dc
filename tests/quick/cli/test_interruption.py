"""Signals while there is no run yet: the program inside a command that takes its time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from left_behind import bystanders, left_of

SLOW = (
    "import sys, time; from appliance import cli\n"
    "from appliance.recipe import library\n"
    "def slow():\n    sys.stdout.write('ready\\n'); sys.stdout.flush(); time.sleep(100)\n"
    "library.names = slow\n"
    "sys.argv = ['appliance', 'recipes', 'ls']\n"
    "cli.main()\n"
)


def started(*python: str, cwd: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, *python], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_before_a_run_ends_with_130_and_a_word(number: signal.Signals, tmp_path: Path) -> None:
    process = started("-c", SLOW, cwd=tmp_path)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, f"stopped by {number.name}, there was nothing to save\n")


def test_signal_in_code_from_a_string_ends_with_130_too(tmp_path: Path) -> None:
    """As while a dataclass is made: under `python -m` a KeyboardInterrupt there would end Python by SIGINT."""
    code = SLOW.replace("time.sleep(100)", "exec('time.sleep(100)')")
    (tmp_path / "slow.py").write_text(f"from appliance import console; console.say('')\n{code}")
    process = started("-m", "slow", cwd=tmp_path)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "\nstopped by SIGTERM, there was nothing to save\n")


def test_hangup_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """As `nohup` leaves it."""
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + SLOW
    process = started("-c", ignoring, cwd=tmp_path)
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "stopped by SIGTERM, there was nothing to save\n")


# Preflight's own child, which grades a few problems, stands still: every Python imports this at its start.
STILL = (
    "import os, pathlib, sys, time\n"
    "if 'appliance.tasks.sample' in sys.orig_argv:\n"
    "    pathlib.Path(os.environ['SAYS_SO']).touch(); time.sleep(100)\n"
)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_in_the_preflight_of_a_training_leaves_no_child_and_no_folder(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Ctrl-C goes to all that share the terminal, SIGTERM to the launcher alone."""
    (tmp_path / "sitecustomize.py").write_text(STILL)
    started_file, runs = tmp_path / "said", tmp_path / "runs"
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    since = bystanders()
    launcher = subprocess.Popen(
        [sys.executable, "-m", "appliance", "train", "arithmetic-tiny-int8", "--set", f"cluster.run_dir={runs}"],
        env={**os.environ, "PYTHONPATH": paths, "SAYS_SO": str(started_file)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    while not started_file.exists():
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.02)
    assert len(left_of(runs, since=since)) == 2
    if number == signal.SIGINT:
        os.killpg(launcher.pid, number)
    else:
        launcher.send_signal(number)
    out, err = launcher.communicate(timeout=60)
    assert (launcher.returncode, out, err) == (130, "", f"stopped by {number.name}, there was nothing to save\n")
    assert left_of(runs, since=since) == []
    assert not runs.exists()

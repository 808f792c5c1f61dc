"""Signals while there is no run yet: the program inside a command that takes its time."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

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

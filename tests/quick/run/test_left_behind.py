"""The scan that says of every run that no process is left: it sees an orphan that has written over its mark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from left_behind import bystanders, left_of

from appliance.processes import find_processes
from appliance.terms.environment import RUN_VARIABLE

# As an engine's core that outlives everybody: a session of its own, no parent, and a title where the mark was.
ORPHAN = """
import os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
from setproctitle import setproctitle
setproctitle("VLLM::EngineCore")
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(100)
"""


def test_an_orphan_with_a_title_of_its_own_is_found(tmp_path: Path, wait_until: Callable) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    since = bystanders()
    pid_file = tmp_path / "pid"
    mark = {RUN_VARIABLE: str(tmp_path)}
    subprocess.run([sys.executable, "-c", ORPHAN, str(pid_file)], env={**os.environ, **mark}, check=True)
    try:
        wait_until(lambda: pid_file.exists() and pid_file.read_text())
        orphan = int(pid_file.read_text())
        (found,) = left_of(tmp_path, since=since)
        assert (found.pid, found.parent, found.name) == (orphan, os.getpid(), "VLLM::EngineCor")
        assert find_processes(f"{RUN_VARIABLE}={tmp_path}") == []  # the mark is gone: it alone proves nothing
        os.kill(orphan, signal.SIGKILL)
        wait_until(lambda: left_of(tmp_path, since=since) == [])
    finally:
        other.kill()
        other.wait()

"""container/engine.sh starts an engine, after a crash too, and ends the one that it started, and no other process.

No engine is started here: the programs that they call are of the test.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LASTS = "while :; do sleep 0.1; done"


@pytest.fixture
def script(root: Path, tmp_path: Path) -> Path:
    """The script with a folder of the test in the place of root's."""
    text = (root / "container/engine.sh").read_text()
    for name, there, here in (
        ("folder", "/run/flashrl-appliance", "run"),
        ("running", "/var/run/docker", "docker"),
    ):
        assert text.count(f"{name}={there} ") == 1
        text = text.replace(f"{name}={there} ", f"{name}={tmp_path}/{here} ")
    return program(tmp_path / "engine.sh", text)


def program(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)
    return file


def call(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """With the programs of the test before the real ones."""
    env = {**os.environ, "PATH": f"{script.parent}/bin:/usr/bin:/bin", "TMPDIR": str(script.parent)}
    return subprocess.run([script, *arguments], env=env, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def process(script: Path, tmp_path: Path) -> Iterator[Callable[[str, str], subprocess.Popen[bytes]]]:
    """Starts a program of that name and text, whose number the script finds in its file."""
    processes = []

    def start(name: str, text: str) -> subprocess.Popen[bytes]:
        processes.append(
            subprocess.Popen([program(tmp_path / "bin" / name, f"{text}\necho; {LASTS}")], stdout=subprocess.PIPE)
        )
        assert processes[-1].stdout.readline() == b"\n"  # it is up
        (tmp_path / "run").mkdir()
        (tmp_path / "run/dockerd.pid").write_text(f"{processes[-1].pid}\n")
        return processes[-1]

    yield start
    for started in processes:
        started.kill()
        started.wait()
        started.stdout.close()


def test_stop_ends_the_engine_that_it_started(script: Path, process: Callable) -> None:
    engine = process("dockerd", "")
    done = subprocess.Popen([script, "stop"], stderr=subprocess.PIPE, text=True)
    assert engine.wait(60) == -15
    assert (done.communicate(timeout=60)[1], done.returncode) == ("", 0)
    assert not (script.parent / "run/dockerd.pid").exists()


def test_stop_leaves_a_process_that_has_the_number_now(script: Path, process: Callable) -> None:
    other = process("another", "")
    done = call(script, "stop")
    assert (done.returncode, done.stderr, other.poll()) == (0, "", None)


@pytest.mark.parametrize("crashed", [True, False])
def test_one_starts_after_one_that_crashed_and_not_beside_one_that_runs(
    script: Path, process: Callable, crashed: bool
) -> None:
    """As dockerd does: none starts while a process has the number in its file, one that nobody waited for included."""
    files = [script.parent / name for name in ("docker.pid", "docker/containerd/containerd.pid")]
    before = process("before", "")
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(before.pid))
    if crashed:
        before.kill()
        os.waitid(os.P_PID, before.pid, os.WEXITED | os.WNOWAIT)  # it stays, as of a parent that does not look
    up = script.parent / "up"
    program(script.parent / "bin/dockerd", f"[ ! -e {files[0]} ] && [ ! -e {files[1]} ] || exit 1\ntouch {up}")
    for name in "debootstrap", "docker-compose":
        program(script.parent / "bin" / name, "")
    program(script.parent / "bin/docker", f"[ -e {up} ] && echo 20.10")
    if not crashed:
        program(script.parent / "bin/sleep", "")
    done = call(script)
    assert (done.returncode, up.exists()) == ((0, True) if crashed else (1, False)), done
    assert all(file.exists() is not crashed for file in files)
    assert ("started" if crashed else "no Docker engine answers") in done.stderr

"""container/engine.sh ends the Docker engine that it started, and no other process.

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
    assert text.count("folder=/run/flashrl-appliance ") == 1
    return program(tmp_path / "engine.sh", text.replace("folder=/run/flashrl-appliance ", f"folder={tmp_path}/run "))


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
    made = []

    def start(name: str, text: str) -> subprocess.Popen[bytes]:
        made.append(
            subprocess.Popen([program(tmp_path / "bin" / name, f"{text}\necho; {LASTS}")], stdout=subprocess.PIPE)
        )
        assert made[-1].stdout.readline() == b"\n"  # it is up
        (tmp_path / "run").mkdir()
        (tmp_path / "run/dockerd.pid").write_text(f"{made[-1].pid}\n")
        return made[-1]

    yield start
    for each in made:
        each.kill()
        each.wait()
        each.stdout.close()


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

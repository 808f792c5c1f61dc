"""docker-compose.yml brings its services up: the CPU profile trains, TensorBoard answers on loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.docker
ROOT = Path(__file__).parents[2]
PROJECT = "flashrl-test"


def program() -> list[str]:
    """`docker compose` where the plugin is, else docker-compose."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    assert shutil.which("docker-compose"), "neither `docker compose` nor docker-compose is installed"
    return ["docker-compose"]


def compose(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [*program(), "--project-name", PROJECT, "--file", str(ROOT / "docker-compose.yml"), *arguments]
    env = {**os.environ, "COMPOSE_PROFILES": "cpu,tensorboard"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=check, timeout=1200)


@pytest.fixture
def project(image: str, engine) -> Iterator[None]:
    compose("down", "--volumes", check=False)
    yield
    compose("down", "--volumes", "--timeout", "30", check=False)


def test_the_file_is_valid_for_this_compose(engine) -> None:
    assert compose("config", "--services").stdout.split() == ["tensorboard", "train", "train-cpu"]


def test_the_cpu_profile_checks_its_host_and_keeps_its_runs(project: None) -> None:
    """Named volumes, a read-only root, another user: nothing to find, so a run in it would start."""
    done = compose("run", "--rm", "train-cpu", "check", "arithmetic-tiny-int8", check=False)
    assert (done.returncode, done.stdout) == (0, "arithmetic-tiny-int8: this host can run it\n"), done.stderr


def test_tensorboard_answers_on_loopback(project: None) -> None:
    compose("up", "--detach", "tensorboard")
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen("http://127.0.0.1:6006/", timeout=5) as answer:
                assert answer.status == 200
                return
        except OSError:
            time.sleep(1)
    pytest.fail(compose("logs", "tensorboard", check=False).stdout[-3000:])

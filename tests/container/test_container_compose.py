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
from images import IMAGE, USER, open_to_all

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


def compose(*arguments: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [*program(), "--project-name", PROJECT, "--file", str(ROOT / "docker-compose.yml"), *arguments]
    env = {**os.environ, "COMPOSE_PROFILES": "cpu,tensorboard,cluster", **variables}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=check, timeout=1200)


STEPS = 2
NAMED_WITHIN_S = 60
PATIENCE_S = 900
RECIPE = f"""\
name: over-two
extends: arithmetic-tiny-int8
trainer: {{steps: 500, validate_before: false, validate_every: 1000}}
task: {{val_size: 16}}
quantization: {{profile: none}}
cluster: {{wait_s: {PATIENCE_S}}}
"""


@pytest.fixture
def project(image: str, engine) -> Iterator[None]:
    compose("down", "--volumes", check=False)
    yield
    compose("down", "--volumes", "--timeout", "30", check=False)


def test_the_file_is_valid_for_this_compose(engine) -> None:
    services = compose("config", "--services").stdout.split()
    assert sorted(services) == ["head", "tensorboard", "train", "train-cpu", "worker"]


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


@pytest.fixture
def network(engine) -> Iterator[str]:
    made = engine.networks.create("flashrl-test-nodes")
    yield made.name
    made.remove()


def test_head_and_worker_train_together_and_the_loss_of_the_worker_is_named(
    project: None, network: str, engine, tmp_path: Path
) -> None:
    runs, recipes = tmp_path / "runs", tmp_path / "recipes"
    for folder in (runs, recipes):
        folder.mkdir()
        os.chown(folder, USER, 0)
    open_to_all(tmp_path)
    (recipes / "two.yaml").write_text(RECIPE)
    given = {
        "NODE_IMAGE": IMAGE,
        "NODE_RUNTIME": "runc",
        "CLUSTER_NETWORK": network,
        "SHM_SIZE": "1gb",
        "MEMLOCK": "67108864",
    }
    given |= {"RUNS": str(runs), "RECIPES": str(recipes), "RECIPE": "/recipes/two.yaml"}
    compose("up", "--detach", "head", "worker", **given)
    try:
        head = engine.containers.get("flashrl-head")
        worker = next(each for each in engine.containers.list() if "worker" in each.name)
        wait_for_steps(runs / "over-two-1" / "metrics.jsonl", head)
        worker.kill()
        code = head.wait(timeout=NAMED_WITHIN_S)["StatusCode"]
        log = head.logs().decode()
        attested = sorted(file.stem for file in (runs / "over-two-1" / "attest").glob("*.json"))
    finally:
        compose("down", "--volumes", "--timeout", "30", check=False, **given)
    assert code == 5, log[-3000:]
    assert ": node " in log and "left the cluster" in log, log[-3000:]
    assert attested == ["driver-0", "rollout-0-0", "rollout-1-0", "trainer-0", "trainer-1"]


def wait_for_steps(metrics: Path, container) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= STEPS):
        container.reload()
        assert container.status == "running" and time.monotonic() < deadline, container.logs().decode()[-3000:]
        time.sleep(0.5)

"""docker-compose.yml brings its services up: the CPU profile trains, TensorBoard answers on loopback."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from docker.models.containers import Container
from docker.types import Mount
from images import IMAGE, PROJECT, removed_at_the_end, runs_with, said_by
from trainings import holding

pytestmark = pytest.mark.docker
ROOT = Path(__file__).parents[2]


def program() -> list[str]:
    """`docker compose` where the plugin is, else docker-compose."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    assert shutil.which("docker-compose"), "neither `docker compose` nor docker-compose is installed"
    return ["docker-compose"]


def compose(*arguments: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    """check: it ends well, and has nothing to warn of."""
    command = [*program(), "--project-name", PROJECT, "--file", str(ROOT / "docker-compose.yml"), *arguments]
    env = {**os.environ, "COMPOSE_PROFILES": "cpu,tensorboard,cluster", **variables}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=1200)
    assert not check or (done.returncode == 0 and "undefined" not in done.stderr), done.stderr
    return done


STEPS = 2
NAMED_WITHIN_S = 60
PATIENCE_S = 900
RUN = "/appliance/runs/over-two-1"
RECIPE = f"""\
name: over-two
extends: arithmetic-tiny-int8
trainer: {{steps: 500, validate_before: false, validate_every: 1000}}
task: {{val_size: 16}}
quantization: {{profile: none}}
cluster: {{wait_s: {PATIENCE_S}}}
"""
OF_ROWS = """\
name: mine
extends: gsm8k-tiny-int8
task: {train_file: /data/rows.jsonl, val_size: 4}
trainer: {steps: 1, validate_before: false}
quantization: {profile: none}
"""


@pytest.fixture
def project(image: str, engine) -> Iterator[None]:
    compose("down", "--volumes", check=False)
    yield
    compose("down", "--volumes", "--timeout", "30", check=False)


def test_the_file_is_valid_for_this_compose(engine) -> None:
    services = compose("config", "--services").stdout.split()
    assert sorted(services) == ["head", "tensorboard", "train", "train-cpu", "worker"]


def test_the_cpu_profile_trains_and_a_second_container_reads_the_run(
    project: None, engine, image: str, cache: Path, tmp_path: Path
) -> None:
    """The four folders of the README: recipe and data of the host, to read; runs and caches in volumes with names.

    A read-only root, another user. Only the tiny model is put there before, which takes a minute and a half to make.
    """
    for name in ("recipes", "data", "models"):
        (tmp_path / name).mkdir()
    (tmp_path / "recipes/mine.yaml").write_text(OF_ROWS)
    rows = ({"question": f"Anna has {n} crates. How many are they?", "answer": f"#### {n}"} for n in range(20))
    (tmp_path / "data/rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    folders = {name.upper(): str(tmp_path / name) for name in ("recipes", "data", "models")}
    copying = ("--volume", f"{cache}:/mnt/cache:ro", "--entrypoint", "cp")
    compose("run", "--rm", *copying, "train-cpu", "-r", "/mnt/cache", "/appliance/runs/.cache", **folders)
    line = ("train", "/recipes/mine.yaml", "--name", "mine")
    done = compose("run", "--rm", "train-cpu", *line, check=False, **folders)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "is not on a volume" not in done.stdout + done.stderr
    script = ["-c", "cat mine/run.json && test -s mine/model/model.safetensors"]
    volume = {f"{PROJECT}_runs": {"bind": "/kept", "mode": "ro"}}
    said = said_by(engine, image, script, entrypoint="/bin/sh", working_dir="/kept", volumes=volume)
    assert (json.loads(said)["state"], json.loads(said)["exit_code"]) == ("done", 0)


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


@pytest.fixture
def environment(network: str, cache: Path, tmp_path: Path) -> dict[str, str]:
    """Variables of the compose file for two nodes without GPUs: folders with the recipe and a cache, a network."""
    runs, recipes = runs_with(cache, tmp_path / "runs"), tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "two.yaml").write_text(RECIPE)
    variables = {
        "NODE_IMAGE": IMAGE,
        "NODE_RUNTIME": "runc",
        "CLUSTER_NETWORK": network,
        "SHM_SIZE": "1gb",
        "NODES": "2",
    }
    for name in ("MEMLOCK", "NOFILE"):  # an engine that may not raise them gives what it has
        variables[name] = str(resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1])
    variables |= {"RUNS": str(runs), "RECIPES": str(recipes)}
    return {**variables, "RECIPE": "/recipes/two.yaml"}


def test_head_and_worker_train_together_and_the_loss_of_the_worker_is_named(
    project: None, engine, environment: dict[str, str]
) -> None:
    """Before the worker: one with another token is refused and the head waits on; after it, the worker is killed."""
    run = Path(environment["RUNS"]) / "over-two-1"
    compose("up", "--detach", "head", **environment)
    try:
        head = engine.containers.get("flashrl-head")
        wait_until(lambda: "starting the Ray head" in head.logs().decode(), head)
        refused = join_with(engine, environment, token="0123456789abcdef0123456789abcdef")
        assert refused[0] == 3, refused[1]
        assert "flashrl-head:6379 refused this node's token" in refused[1]
        compose("up", "--detach", "--no-recreate", "worker", **environment)
        worker = next(each for each in engine.containers.list() if "worker" in each.name)
        metrics = run / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= STEPS, head)
        health = worker.exec_run(["appliance", "health"])
        worker.kill()
        code = head.wait(timeout=NAMED_WITHIN_S)["StatusCode"]
        log = head.logs().decode()
        attested = {file.stem: json.loads(file.read_text()) for file in (run / "attest").glob("*.json")}
        described = json.dumps([head.attrs, worker.attrs])
    finally:
        compose("down", "--volumes", "--timeout", "30", check=False, **environment)
    assert code == 5, log[-3000:]
    assert f": node {worker.id[:12]} (" in log and "left the cluster" in log, log[-3000:]
    assert health.exit_code == 0 and health.output.startswith(b"healthy: node of over-two-1: attempt 1, "), health
    assert sorted(attested) == ["driver-0", "rollout-0-0", "rollout-1-0", "trainer-0", "trainer-1"]
    nodes = {process: said["detail"]["node"] for process, said in attested.items()}
    assert nodes["driver-0"] == head.id[:12]
    for role in ("rollout", "trainer"):  # one of each on each node
        assert {nodes[each] for each in nodes if each.startswith(role)} == {head.id[:12], worker.id[:12]}, nodes
    token = Path(environment["RUNS"]) / ".cluster-token"
    word = token.read_text().strip()
    assert word not in described + log and holding(Path(environment["RUNS"]), word, but=token) == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("sources", "joined with other sources or locks than the head"),
        ("folder", f"does not see {RUN}: cluster.run_dir must be on a file system that all nodes share"),
    ],
)
def test_a_worker_with_other_sources_or_another_folder_is_refused_by_its_name(
    project: None, engine, environment: dict[str, str], tmp_path: Path, other: str, words: str
) -> None:
    changed, empty = tmp_path / "errors.py", tmp_path / "empty"
    changed.write_text((ROOT / "appliance/errors.py").read_text() + "\n# changed\n")
    empty.mkdir()
    source = Mount("/opt/appliance/appliance/errors.py", str(changed), type="bind", read_only=True)
    differs = {"sources": {"mounts": [source]}, "folder": {"runs": empty}}[other]
    compose("up", "--detach", "head", **environment)
    try:
        head = engine.containers.get("flashrl-head")
        token = Path(environment["RUNS"]) / ".cluster-token"
        wait_until(token.exists, head)
        code_and_log = join_with(engine, environment, token=token.read_text(), hostname="another", **differs)
        code = head.wait(timeout=PATIENCE_S)["StatusCode"]
        log = head.logs().decode()
    finally:
        compose("down", "--volumes", "--timeout", "30", check=False, **environment)
    assert code == 3, log[-3000:]
    assert re.search(rf"another( \(\S+\))?: {re.escape(words)}", log), log[-3000:]
    assert "joined; this node works" in code_and_log[1]


def join_with(
    engine,
    environment: dict[str, str],
    *,
    token: str,
    mounts: Iterable[Mount] = (),
    runs: Path | None = None,
    hostname: str = "wrong",
) -> tuple[int, str]:
    """(exit code, log) of a worker beside the compose file's: `join` with this token. runs: None: the head's."""
    file = Path(environment["RECIPES"]).parent / f"token-{hostname}"
    file.write_text(token)
    inside = "/run/secrets/token"
    container = engine.containers.run(
        IMAGE,
        ["join", "--head", "flashrl-head", "--token-file", inside],
        detach=True,
        hostname=hostname,
        network=environment["CLUSTER_NETWORK"],
        shm_size="1g",
        mounts=[*mounts, Mount(inside, str(file), type="bind", read_only=True)],
        volumes={str(runs or environment["RUNS"]): {"bind": "/appliance/runs", "mode": "rw"}},
    )
    with removed_at_the_end(container):
        return container.wait(timeout=PATIENCE_S)["StatusCode"], container.logs().decode()


def wait_until(condition: Callable[[], bool], container: Container) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        container.reload()
        assert container.status == "running" and time.monotonic() < deadline, container.logs().decode()[-3000:]
        time.sleep(0.5)

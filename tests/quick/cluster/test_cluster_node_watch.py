"""When a joined node is over, beside what Ray says: the judgement, and a watch of real sockets and processes."""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.cluster import join
from appliance.cluster.form import RETURNS_WITHIN_S
from appliance.cluster.join import NodeHealth, NodeIsOver, NodeWatch, is_over
from appliance.cluster.node_report import write_notice
from appliance.record.session import RunRecord, RunStatus, write_record
from appliance.terms.environment import NODE_VARIABLE, RUN_VARIABLE, ray_node_env

SOON_S = 60.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "_LOOK_EVERY_S", 0.05)


@pytest.mark.parametrize(
    ("health", "over"),
    [
        (NodeHealth(), False),
        (NodeHealth(silent_s=29.9), False),
        (NodeHealth(silent_s=30.0), True),
        (NodeHealth(ended=True), False),  # a cluster that is there already has the next training
        (NodeHealth(ended=True, silent_s=2.0), True),
        (NodeHealth(without_scheduler=2), False),
        (NodeHealth(without_scheduler=3), True),
    ],
)
def test_a_node_is_over_without_head_or_scheduler(health: NodeHealth, over: bool) -> None:
    assert is_over(health) is over


def test_ray_gives_up_within_the_minute_that_is_promised() -> None:
    env = ray_node_env()
    assert float(env["RAY_gcs_rpc_server_reconnect_timeout_s"]) == 30
    assert float(env["RAY_raylet_liveness_self_check_interval_ms"]) == 10_000
    checks = 5  # Ray's own
    apart_s = float(env["RAY_health_check_period_ms"]) / 1000
    killed_s, silent_s = checks * apart_s, checks * (apart_s + float(env["RAY_health_check_timeout_ms"]) / 1000)
    assert (killed_s, silent_s) == (5, 30)
    assert killed_s + RETURNS_WITHIN_S < 60


def joined(head: str, folder: Path) -> NodeWatch:
    log = folder / "ray.log"
    log.write_text("Ray runtime started.\n")
    return NodeWatch(head, folder=folder, log=log)


def ticks_until_over(watch: NodeWatch) -> None:
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        watch.tick()
        time.sleep(0.02)


def scheduler_of(folder: Path) -> subprocess.Popen[bytes]:
    """A process of that name with the node's mark."""
    program = folder / "raylet"
    shutil.copy(shutil.which("sleep"), program)
    return subprocess.Popen([program, "600"], env={**os.environ, RUN_VARIABLE: str(folder)})


@pytest.fixture
def head() -> Iterator[str]:
    """Something that answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_scheduler_that_ends_ends_the_node(tmp_path: Path, head: str, capsys: pytest.CaptureFixture[str]) -> None:
    scheduler = scheduler_of(tmp_path)
    with joined(head, tmp_path) as watch:
        time.sleep(0.5)
        watch.tick()
        scheduler.kill()
        scheduler.wait()
        with pytest.raises(NodeIsOver):
            ticks_until_over(watch)
    assert not watch.was_silent
    assert capsys.readouterr().err == "joined; this node works for the training until it ends\n"


def test_a_silence_of_long_ago_says_nothing_of_this_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "head_problem", lambda _: next(problems, ""))
    problems = iter(["refused"])
    with joined("127.0.0.1:1", tmp_path) as watch:
        time.sleep(0.5)
        assert watch.was_silent
        monkeypatch.setattr(join, "RECONNECT_S", 0.1)
        assert not watch.was_silent


def test_a_node_leaves_at_once_when_its_training_has_ended_and_the_head_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, record = tmp_path / "run", RunRecord(state=RunStatus.RUNNING)
    run_dir.mkdir()
    write_record(run_dir, record)
    monkeypatch.setenv(NODE_VARIABLE, str(tmp_path))
    write_notice(run_dir)
    scheduler = scheduler_of(tmp_path)
    try:
        with joined("127.0.0.1:1", tmp_path) as watch:
            time.sleep(0.5)
            watch.tick()  # silent, but not for long
            write_record(run_dir, dataclasses.replace(record, state=RunStatus.DONE))
            with pytest.raises(NodeIsOver):
                ticks_until_over(watch)
    finally:
        scheduler.kill()
        scheduler.wait()

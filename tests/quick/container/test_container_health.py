"""The health check follows the run: what it says of each state, and how it finds the run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from appliance.cluster.node_report import write_notice
from appliance.container.health import QUIET_S, ContainerHealth, find_marked_folders, judge_run, look_at_container
from appliance.record.session import RunRecord, RunStatus, write_record

RUNNING = RunRecord(RunStatus.RUNNING, phase="rollout", attempt=2)


@pytest.mark.parametrize(
    ("record", "launched", "quiet_s", "health"),
    [
        (RUNNING, True, 1.0, ContainerHealth(True, "a-1: attempt 2, generating rollouts")),
        (RUNNING, False, 1.0, ContainerHealth(False, "a-1: attempt 2, generating rollouts: its launcher is gone")),
        (
            RUNNING,
            True,
            QUIET_S + 60,
            ContainerHealth(False, "a-1: attempt 2, generating rollouts: nothing new for 31 minutes"),
        ),
        (RunRecord(RunStatus.DONE, phase="done"), False, 1.0, ContainerHealth(True, "a-1: attempt 1, done")),
        (
            RunRecord(RunStatus.FAILED, reason="the disk is full"),
            True,
            1.0,
            ContainerHealth(False, "a-1: failed: the disk is full"),
        ),
    ],
)
def test_health_of_a_run(record: RunRecord, launched: bool, quiet_s: float, health: ContainerHealth) -> None:
    assert judge_run("a-1", record, launched=launched, quiet_s=quiet_s) == health


def a_process(proc: Path, *, pid: int, environment: bytes) -> None:
    (proc / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "environ").write_bytes(environment)


def test_runs_are_found_by_the_mark_of_their_processes(tmp_path: Path) -> None:
    a_process(tmp_path, pid=7, environment=b"HOME=/tmp\0APPLIANCE_RUN=/runs/a-1\0")
    a_process(tmp_path, pid=8, environment=b"APPLIANCE_RUN=/runs/a-1\0")
    a_process(tmp_path, pid=9, environment=b"NOT_APPLIANCE_RUN=/runs/b-1\0")
    (tmp_path / "self").mkdir()
    assert find_marked_folders(tmp_path) == ([Path("/runs/a-1")], [])


def test_before_the_run_has_processes_it_is_healthy(tmp_path: Path) -> None:
    assert look_at_container(tmp_path) == ContainerHealth(True, "no run yet")


def test_a_run_without_its_record_is_not_healthy(tmp_path: Path) -> None:
    a_process(tmp_path / "proc", pid=7, environment=f"APPLIANCE_RUN={tmp_path}/a-1\0".encode())
    found = look_at_container(tmp_path / "proc")
    assert not found.is_healthy and "No such file or directory" in found.text


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """The folder of a `join`. Of its processes Ray's has the folder's mark, and a worker that of the run."""
    folder = tmp_path / "appliance-node-x"
    folder.mkdir()
    for pid, run in ((7, folder), (8, tmp_path / "a-1")):
        environment = f"APPLIANCE_RUN={run}\0APPLIANCE_NODE={folder}\0".encode()
        a_process(tmp_path / "proc", pid=pid, environment=environment)
    return folder


def test_a_node_is_healthy_before_it_knows_its_training(tmp_path: Path, node: Path) -> None:
    assert find_marked_folders(tmp_path / "proc") == ([], [node])
    assert look_at_container(tmp_path / "proc") == ContainerHealth(True, "a node that has no training yet")


def test_a_node_follows_the_run_that_it_works_for(tmp_path: Path, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher is on another host: no lock of it is looked for here."""
    run = tmp_path / "a-1"
    run.mkdir()
    write_record(run, RUNNING)
    monkeypatch.setenv("APPLIANCE_NODE", str(node))
    write_notice(run)
    assert look_at_container(tmp_path / "proc") == ContainerHealth(True, "node of a-1: attempt 2, generating rollouts")
    write_record(run, RunRecord(RunStatus.FAILED, reason="the disk is full"))
    assert look_at_container(tmp_path / "proc") == ContainerHealth(False, "node of a-1: failed: the disk is full")
    old = time.time() - 2 * QUIET_S
    write_record(run, RUNNING)
    os.utime(run, (old, old))
    assert look_at_container(tmp_path / "proc").text.endswith("nothing new for 60 minutes")


def test_processes_that_lost_their_node_are_still_its(
    tmp_path: Path, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """setproctitle writes over the environment that /proc shows."""
    run = tmp_path / "a-1"
    run.mkdir()
    write_record(run, RUNNING)
    monkeypatch.setenv("APPLIANCE_NODE", str(node))
    write_notice(run)
    a_process(tmp_path / "proc", pid=9, environment=f"APPLIANCE_RUN={node}\0".encode())
    a_process(tmp_path / "proc", pid=10, environment=f"APPLIANCE_RUN={run}\0".encode())
    assert look_at_container(tmp_path / "proc") == ContainerHealth(True, "node of a-1: attempt 2, generating rollouts")


def test_a_node_that_does_not_see_its_run_is_not_healthy(tmp_path: Path, node: Path) -> None:
    (node / "training.json").write_text(json.dumps({"run_dir": str(tmp_path / "gone"), "attempt": 1}))
    found = look_at_container(tmp_path / "proc")
    assert not found.is_healthy and found.text.startswith(f"node {node}: ") and "No such file" in found.text


def test_the_newest_word_of_any_process_counts(tmp_path: Path) -> None:
    run = tmp_path / "a-1"
    (run / "logs/1").mkdir(parents=True)
    write_record(run, RunRecord(RunStatus.DONE, phase="done"))
    old = time.time() - 2 * QUIET_S
    for name in ("events.jsonl", "metrics.jsonl", "logs/1/train.log"):
        (run / name).touch()
        os.utime(run / name, (old, old))
    a_process(tmp_path / "proc", pid=7, environment=f"APPLIANCE_RUN={run}\0".encode())
    assert look_at_container(tmp_path / "proc") == ContainerHealth(
        False, "a-1: attempt 1, done: nothing new for 60 minutes"
    )
    (run / "logs/1/train.log").touch()
    assert look_at_container(tmp_path / "proc") == ContainerHealth(True, "a-1: attempt 1, done")

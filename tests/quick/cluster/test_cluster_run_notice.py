"""What a joined node knows of its training, and what `join` says and returns when it is over."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.cluster.join import _end
from appliance.cluster.node_report import RunNotice, is_resumed, read_end, read_notice, write_notice
from appliance.errors import EngineError, ProcessDied, TrainingError
from appliance.record.session import RunRecord, RunStatus, write_record
from appliance.terms.environment import NODE_VARIABLE

NOWHERE = "127.0.0.1:1"
GOING = RunRecord(state=RunStatus.RUNNING, attempt=2)
HERE = 2


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "over-two"
    folder.mkdir()
    write_record(folder, GOING)
    return folder


@pytest.fixture
def head() -> Iterator[str]:
    """Something that answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_node_keeps_where_its_run_is(tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = tmp_path / "node"
    node.mkdir()
    monkeypatch.setenv(NODE_VARIABLE, str(node))
    assert read_notice(node) is None
    write_notice(run_dir)
    assert read_notice(node) == RunNotice(run_dir, attempt=HERE)
    write_notice(tmp_path / "not shared")
    assert read_notice(node) == RunNotice(run_dir, attempt=HERE)
    assert [file.name for file in node.iterdir()] == ["training.json"]


def test_where_no_join_made_the_node_nothing_is_kept(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NODE_VARIABLE, raising=False)
    before = sorted(run_dir.iterdir())
    write_notice(run_dir)
    assert sorted(run_dir.iterdir()) == before


@pytest.mark.parametrize("state", [RunStatus.STARTING, RunStatus.RUNNING])
def test_a_training_that_goes_on_has_no_end(run_dir: Path, state: RunStatus) -> None:
    write_record(run_dir, dataclasses.replace(GOING, state=state))
    assert read_end(RunNotice(run_dir, attempt=HERE)) is None


def test_the_end_of_another_attempt_is_not_this_ones(run_dir: Path) -> None:
    ended = dataclasses.replace(GOING, state=RunStatus.FAILED, attempt=HERE + 1)
    write_record(run_dir, ended)
    assert read_end(RunNotice(run_dir, attempt=HERE)) is None
    assert is_resumed(RunNotice(run_dir, attempt=HERE)) and not is_resumed(RunNotice(run_dir, attempt=HERE + 1))
    assert read_end(RunNotice(run_dir, attempt=HERE + 1)) == ended


def test_a_run_that_cannot_be_read_has_no_end(run_dir: Path) -> None:
    (run_dir / "run.json").write_text("{")
    assert read_end(RunNotice(run_dir, attempt=HERE)) is None
    assert not is_resumed(RunNotice(run_dir / "gone", attempt=HERE))


def ended(head: str, training: RunNotice | None, tmp_path: Path, *, was_silent: bool = False) -> int:
    log = tmp_path / "ray.log"
    log.write_text("the last words of Ray\n")
    return _end(head, training=training, was_silent=was_silent, code=1, log=log)


@pytest.mark.parametrize(
    ("state", "reason", "stderr"),
    [
        (RunStatus.DONE, "", "the training over-two ended: done\n"),
        (RunStatus.STOPPED, "saved after step 3", "the training over-two ended: saved after step 3\n"),
    ],
)
def test_a_training_that_ended_as_it_should_ends_the_node_well(
    run_dir: Path, tmp_path: Path, state: RunStatus, reason: str, stderr: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(run_dir, dataclasses.replace(GOING, state=state, exit_code=0, reason=reason))
    assert ended(NOWHERE, RunNotice(run_dir, attempt=HERE), tmp_path) == 0
    assert capsys.readouterr().err == stderr


def test_a_training_that_failed_is_told_with_its_reason(run_dir: Path, tmp_path: Path) -> None:
    reason = "ProcessDied: node beta (10.0.0.2) left the cluster"
    write_record(run_dir, dataclasses.replace(GOING, state=RunStatus.FAILED, exit_code=5, reason=reason))
    with pytest.raises(TrainingError) as caught:
        ended(NOWHERE, RunNotice(run_dir, attempt=HERE), tmp_path)
    assert caught.value.exit_code == 5
    assert caught.value.message == f"the training over-two failed: {reason}"


@pytest.mark.parametrize("knows", [True, False])
def test_a_head_that_is_gone_without_a_word_is_named(run_dir: Path, tmp_path: Path, knows: bool) -> None:
    with pytest.raises(ProcessDied) as caught:
        ended(NOWHERE, RunNotice(run_dir, attempt=HERE) if knows else None, tmp_path)
    assert caught.value.message == f"the head at {NOWHERE} is gone, and so is the work of this node"
    assert caught.value.hint == f"join again: the run resumes with `train --resume` on {NOWHERE}"


def test_a_head_that_was_started_anew_is_told_from_one_that_is_there(run_dir: Path, tmp_path: Path, head: str) -> None:
    training = RunNotice(run_dir, attempt=HERE)
    anew = f"the head at {head} was restarted: this node belonged to the one before"
    with pytest.raises(ProcessDied, match=anew):
        ended(head, None, tmp_path, was_silent=True)
    write_record(run_dir, dataclasses.replace(GOING, attempt=HERE + 1))
    with pytest.raises(ProcessDied, match=anew):
        ended(head, training, tmp_path)


def test_ray_that_ends_beside_a_living_head_is_shown(
    run_dir: Path, tmp_path: Path, head: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EngineError) as caught:
        ended(head, RunNotice(run_dir, attempt=HERE), tmp_path)
    assert caught.value.message == f"Ray on this node ended with code 1, and {head} is still there"
    assert capsys.readouterr().err == "  the last words of Ray\n"

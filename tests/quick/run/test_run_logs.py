"""`appliance logs`, from a run's folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from stopped_runs import is_free

from appliance.errors import RecipeError
from appliance.record.plan import RunPlan
from appliance.record.session import (
    RunRecord,
    RunStatus,
    Session,
    create_session,
    has_launcher,
    let_go,
    write_record,
)
from appliance.report import logs
from appliance.report.logs import print_logs


@pytest.fixture
def session(tmp_path: Path, small_plan: Callable[..., RunPlan]) -> Session:
    return create_session(small_plan(tmp_path), recipe_yaml="name: small\n", is_chosen=False)


def finish(session: Session) -> None:
    with session:
        session.finish(state=RunStatus.DONE, exit_code=0, reason="")


def test_logs_in_the_order_of_the_work(session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(session)
    (session.log_dir / "train.log").write_bytes(b"trained \xff\n")
    (session.log_dir / "profile.log").write_text("profiled\n")
    (session.log_dir / "prepare.log").write_text("prepared")
    print_logs("small-1", run_root=tmp_path)
    printed = capsys.readouterr()
    assert printed.out == "prepared\nprofiled\ntrained \ufffd\n"
    assert printed.err.splitlines() == [f"== {session.log_dir}/{name}.log" for name in ("prepare", "profile", "train")]


def test_one_of_the_logs(session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(session)
    for name in ("prepare", "train"):
        (session.log_dir / f"{name}.log").write_text(f"{name}d\n")
    print_logs("small-1", run_root=tmp_path, which="train")
    assert capsys.readouterr().out == "traind\n"


def test_stacks_of_a_stall(session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(session)
    stacks = session.log_dir / "stacks"
    stacks.mkdir()
    (stacks / "driver-1.txt").write_text("Thread 1\n")
    (stacks / "worker-2.txt").touch()
    print_logs("small-1", run_root=tmp_path, which="stacks")
    assert capsys.readouterr().out == "Thread 1\n"


@pytest.mark.parametrize("follow", [False, True])
def test_the_last_words_of_a_process_that_died(
    session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str], follow: bool
) -> None:
    finish(session)
    (session.log_dir / "train.log").write_text("whole\nlast wor")
    print_logs("small-1", run_root=tmp_path, follow=follow)
    assert capsys.readouterr().out == "whole\nlast wor\n"


def test_log_of_an_earlier_attempt(session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(session)
    earlier = session.run_dir / "logs" / "7"
    earlier.mkdir()
    (earlier / "train.log").write_text("seventh\n")
    print_logs("small-1", run_root=tmp_path, attempt=7)
    assert capsys.readouterr().out == "seventh\n"


def test_run_without_logs(session: Session, tmp_path: Path) -> None:
    finish(session)
    with pytest.raises(RecipeError) as caught:
        print_logs("small-1", run_root=tmp_path)
    assert caught.value.message == f"run `small-1`: no logs in {session.log_dir} yet"


def test_log_that_is_not_there_names_those_that_are(session: Session, tmp_path: Path) -> None:
    finish(session)
    (session.log_dir / "train.log").touch()
    with pytest.raises(RecipeError) as caught:
        print_logs("small-1", run_root=tmp_path, which="trian")
    assert caught.value.problems == [(f"run `small-1`: no log `trian` in {session.log_dir}", "there are: train")]


def test_attempt_that_is_not_there_names_those_that_are(session: Session, tmp_path: Path) -> None:
    finish(session)
    (session.run_dir / "logs" / "10").mkdir()
    (session.run_dir / "logs" / "2").mkdir()
    with pytest.raises(RecipeError) as caught:
        print_logs("small-1", run_root=tmp_path, attempt=7)
    assert caught.value.problems == [("run `small-1`: no logs of attempt 7", "attempts with logs: 1, 2, 10")]


def test_following_prints_lines_as_they_come_and_ends_with_the_run(
    session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = session.log_dir / "train.log"
    printed: list[str] = []

    def next_look(seconds: float) -> None:
        printed.append(capsys.readouterr().out)
        match len(printed):
            case 1:
                log.write_text("one\ntw")
            case 2:
                with log.open("a") as file:
                    file.write("o\nthree\n")
            case 3:
                finish(session)

    print_logs("small-1", run_root=tmp_path, follow=True, pause=next_look)
    assert printed == ["", "one\n", "two\nthree\n"]
    assert capsys.readouterr().out == ""


def test_following_goes_on_with_the_attempts_that_follow(
    session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two of them their launcher still holds the run."""
    monkeypatch.setattr(logs, "has_launcher", lambda run_dir: not is_free(run_dir))
    (session.log_dir / "train.log").write_text("one\ncut")
    looks = iter(("", "fail", "", "again", "end"))

    def next_look(seconds: float) -> None:
        match next(looks):
            case "fail":
                with session:
                    session.finish(state=RunStatus.FAILED, exit_code=5, reason="x")
                    session.keep_lock()
            case "again":
                second = Session(session.run_dir, record=RunRecord(attempt=2), must_lock=True)
                second.log_dir.mkdir()
                (second.log_dir / "train.log").write_text("two\n")
                write_record(session.run_dir, second.record)
                second.keep_lock()
                second.release()
            case "end":
                assert not has_launcher(session.run_dir) and not is_free(session.run_dir)
                let_go(session.run_dir)

    print_logs("small-1", run_root=tmp_path, follow=True, pause=next_look)
    assert capsys.readouterr().out == "one\ncut\ntwo\n"
    assert next(looks, None) is None and is_free(session.run_dir)


def test_a_record_that_cannot_be_read_is_no_fault_of_ours(tmp_path: Path) -> None:
    (tmp_path / "small-1").mkdir()
    (tmp_path / "small-1" / "run.json").write_text("{")
    with pytest.raises(RecipeError, match="cannot be read as a run"):
        print_logs("small-1", run_root=tmp_path)


@pytest.mark.parametrize("follow", [False, True])
def test_a_log_that_cannot_be_read_is_told(session: Session, tmp_path: Path, follow: bool) -> None:
    """As one of another user: a folder in its place fails for root too."""
    finish(session)
    (session.log_dir / "train.log").mkdir()
    with pytest.raises(RecipeError) as caught:
        print_logs("small-1", run_root=tmp_path, follow=follow, pause=lambda _: None)
    path = session.log_dir / "train.log"
    assert caught.value.message == (f"{session.run_dir}: cannot be read as a run: [Errno 21] Is a directory: '{path}'")


def test_nobody_who_reads_is_no_fault_of_the_run(session: Session, tmp_path: Path, monkeypatch) -> None:
    finish(session)
    (session.log_dir / "train.log").write_text("trained\n")

    def gone(text: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("appliance.console.show", gone)
    with pytest.raises(BrokenPipeError):
        print_logs("small-1", run_root=tmp_path)

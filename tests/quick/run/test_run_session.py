from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from plans import with_trainer

from appliance import console
from appliance.errors import PreflightError, RecipeError
from appliance.launch.train import keep_ray_logs, make_ray_dir
from appliance.record.plan import RunPlan, read_plan
from appliance.record.session import (
    RunRecord,
    RunStatus,
    Session,
    cannot_write,
    create_session,
    free_run_dir,
    has_launcher,
    newest_run_dir,
    read_record,
)


def create(plan: RunPlan, *, is_chosen: bool = False) -> Session:
    return create_session(plan, recipe_yaml="name: small\n", is_chosen=is_chosen)


def test_a_new_run_has_its_files(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path)
    with create(plan) as session:
        run_dir = session.run_dir
        assert (run_dir / "recipe.yaml").read_text() == "name: small\n"
        assert read_plan(run_dir / "plan.json") == plan
        assert json.loads((run_dir / "run.json").read_text()) == {
            "state": "starting",
            "phase": "starting",
            "attempt": 1,
            "exit_code": None,
            "reason": "",
            "schema_version": 1,
        }
        versions = json.loads((run_dir / "versions.json").read_text())
        assert sorted(versions) == ["distributions", "fingerprint", "platform", "python", "schema_version"]
        assert sorted(versions["distributions"]) == ["flashrl-appliance", "rich"]
        assert session.log_dir == run_dir / "logs" / "1"
        assert session.log_dir.is_dir()


def test_name_in_use_is_refused_and_the_run_left_alone(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path)
    with create(plan) as session:
        session.finish(state=RunStatus.DONE, exit_code=0, reason="")
    with pytest.raises(RecipeError) as caught:
        create(with_trainer(plan, steps=99))
    assert caught.value.problems == [
        (f"--name: `small-1` is in use: {plan.run_dir}", "choose another one, or leave it out")
    ]
    assert read_plan(Path(plan.run_dir) / "plan.json").trainer.steps == plan.trainer.steps


def test_losing_a_chosen_name_is_not_the_users_mistake(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path)
    Path(plan.run_dir).mkdir()
    with pytest.raises(RecipeError) as caught:
        create(plan, is_chosen=True)
    assert caught.value.problems == [(f"{plan.run_dir}: another run has just taken this folder", "start again")]


def test_a_new_folder_that_another_launcher_takes_at_once_is_its_own(
    tmp_path: Path, small_plan: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It resumes what it takes for the claim of one that died."""
    plan, mkdir, taken = small_plan(tmp_path), Path.mkdir, []

    def and_taken(folder: Path, *how: object, **more: object) -> None:
        mkdir(folder, *how, **more)
        if folder == Path(plan.run_dir):
            taken.append(Session(folder, record=RunRecord(), must_lock=True))

    monkeypatch.setattr(Path, "mkdir", and_taken)
    with pytest.raises(RecipeError) as caught:
        create(plan, is_chosen=True)
    assert caught.value.problems == [(f"{plan.run_dir}: another run has just taken this folder", "start again")]
    assert [each.name for each in Path(plan.run_dir).iterdir()] == [".lock"]
    taken[0].release()


def test_a_run_has_its_launcher_while_its_folder_is_written(
    tmp_path: Path, small_plan: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, seen = small_plan(tmp_path), []
    monkeypatch.setattr("appliance.record.session.versions", lambda plan: seen.append(has_launcher(Path(plan.run_dir))))
    create(plan).release()
    assert seen == [True] and not has_launcher(Path(plan.run_dir))


def test_file_in_the_way_is_refused(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path)
    Path(plan.run_dir).touch()
    with pytest.raises(RecipeError) as caught:
        create(plan)
    assert caught.value.message == f"{plan.run_dir}: a file is in the way"


def test_folder_that_cannot_be_written_is_a_preflight_error(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path).replace(run_dir="/sys/small-1")  # nobody can make a folder there, root included
    with pytest.raises(PreflightError) as caught:
        create(plan)
    assert (caught.value.message, caught.value.hint) == (
        "/sys/small-1: cannot be written",
        "set cluster.run_dir to a folder that you can write to",
    )


def test_other_os_errors_are_told_in_the_systems_words() -> None:
    error = cannot_write(Path("/x"), OSError(errno.ENAMETOOLONG, "File name too long"))
    assert error.message == "/x: File name too long"


def test_record_survives_the_round_trip(tmp_path: Path, small_plan: Callable) -> None:
    with create(small_plan(tmp_path)) as session:
        session.update(state=RunStatus.RUNNING, phase="rollout")
        assert read_record(session.run_dir) == RunRecord(RunStatus.RUNNING, phase="rollout")
        session.finish(state=RunStatus.STOPPED, exit_code=130, reason="stopped by SIGINT")
    expected = RunRecord(RunStatus.STOPPED, phase="rollout", exit_code=130, reason="stopped by SIGINT")
    assert read_record(session.run_dir) == expected


def test_error_inside_a_session_marks_the_run_as_failed(tmp_path: Path, small_plan: Callable) -> None:
    with pytest.raises(PreflightError), create(small_plan(tmp_path)) as session:
        raise PreflightError("/tmp/x: no space left")
    record = read_record(session.run_dir)
    assert (record.state, record.exit_code) == (RunStatus.FAILED, 3)
    assert record.reason == "PreflightError: /tmp/x: no space left"


def test_a_run_whose_reader_went_away_has_the_exit_code_of_its_launcher(
    tmp_path: Path, small_plan: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout, pytest.raises(BrokenPipeError), create(small_plan(tmp_path)) as session:
        monkeypatch.setattr("sys.stdout", stdout)
        try:
            console.out("{}")
        finally:
            os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # for what it still holds
    record = read_record(session.run_dir)
    assert (record.state, record.exit_code, record.reason) == (
        RunStatus.FAILED,
        141,
        "ReaderGone: [Errno 32] Broken pipe",
    )


def test_lock_tells_whether_the_launcher_lives(tmp_path: Path, small_plan: Callable) -> None:
    with create(small_plan(tmp_path)) as session:
        assert has_launcher(session.run_dir)
    assert not has_launcher(session.run_dir)


def test_who_looks_does_not_take_the_run_from_its_launcher(tmp_path: Path, small_plan: Callable) -> None:
    """Nor from another one who looks."""
    with create(small_plan(tmp_path)) as session:
        pass
    with (session.run_dir / ".lock").open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert not has_launcher(session.run_dir)
        threading.Timer(0.1, fcntl.flock, (looking, fcntl.LOCK_UN)).start()
        with Session(session.run_dir, record=session.record, must_lock=True):
            assert has_launcher(session.run_dir)


@pytest.mark.parametrize("lacks", ["locks", "rights"])
def test_where_nobody_can_ask_for_the_lock_run_json_is_believed(
    lacks: str, tmp_path: Path, small_plan: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run on such a file system has a launcher for ever: none resumes or restarts, and logs are followed on."""
    if lacks == "locks":
        monkeypatch.setattr(fcntl, "flock", MagicMock(side_effect=OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))))
    with create(small_plan(tmp_path)) as session:
        if lacks == "rights":
            (session.run_dir / ".lock").unlink()
            (session.run_dir / ".lock").mkdir()  # as one of another user: refused to root, too
        assert has_launcher(session.run_dir)
        session.finish(state=RunStatus.FAILED, exit_code=5, reason="gone")
    assert not has_launcher(session.run_dir)
    (session.run_dir / "run.json").unlink()
    assert has_launcher(session.run_dir)


def test_free_name_is_after_the_highest(tmp_path: Path) -> None:
    assert free_run_dir(tmp_path / "none", name="a") == tmp_path / "none" / "a-1"
    for name in ("a-2", "a-10", "a-b-77", "a-11.old", "b-40", "a-012", "a-\u0661\u0663"):
        (tmp_path / name).mkdir()
    assert free_run_dir(tmp_path, name="a") == tmp_path / "a-11"
    assert newest_run_dir(tmp_path, name="a") == tmp_path / "a-10"


def test_ray_dir_is_private_and_replaces_a_leftover(tmp_path: Path) -> None:
    folder = Path("/tmp") / f"ray-dir-test-{os.getpid()}"
    try:
        make_ray_dir(str(folder))
        (folder / "old").touch()
        made = make_ray_dir(str(folder))
        assert list(made.iterdir()) == []
        assert made.stat().st_mode & 0o777 == 0o700
    finally:
        folder.rmdir()


def test_ray_dir_is_made_while_somebody_else_removes_the_leftover(monkeypatch: pytest.MonkeyPatch) -> None:
    """The subreaper of a run that was killed, whose launcher is started again at once."""
    folder, unlink = Path("/tmp") / f"ray-dir-test-{os.getpid()}", os.unlink

    def twice(*where: object, **how: object) -> None:
        unlink(*where, **how)
        unlink(*where, **how)

    try:
        make_ray_dir(str(folder))
        (folder / "old").touch()
        monkeypatch.setattr(os, "unlink", twice)
        assert list(make_ray_dir(str(folder)).iterdir()) == []
    finally:
        folder.rmdir()


def test_ray_dir_that_is_a_link_is_refused() -> None:
    link = Path("/tmp") / f"ray-link-test-{os.getpid()}"
    link.symlink_to("/nowhere")
    try:
        with pytest.raises(PreflightError) as caught:
            make_ray_dir(str(link))
        assert caught.value.message == f"{link}: belongs to somebody else"
    finally:
        link.unlink()


def test_ray_logs_are_kept_once(tmp_path: Path) -> None:
    logs = tmp_path / "ray" / "session_1" / "logs"  # Ray's own folder in that of the run
    logs.mkdir(parents=True)
    (logs / "raylet.err").write_text("bad")
    (tmp_path / "ray" / "session_latest").symlink_to(logs.parent)
    keep_ray_logs(tmp_path, target=tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["raylet.err"]

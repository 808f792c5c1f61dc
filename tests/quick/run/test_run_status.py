from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.errors import RecipeError
from appliance.record.events import append_event
from appliance.record.session import RunStatus, Session, create_session
from appliance.report.folder import find_run
from appliance.report.summary import print_status

METRICS = (
    '{"step": 0, "time_s": 50, "val_reward_mean": 0.2, "val_samples": 512}\n'
    '{"step": 1, "time_s": 54, "reward_mean": 0.25, "rollout_tokens_per_s": 400, "step_s": 4, "is_ess": 0.9}\n'
    '{"step": 2, "time_s": 58, "reward_mean": 0.35, "rollout_tokens_per_s": 500, "step_s": 4, "is_ess": 0.1}\n'
    '{"step": 3, "ti'
)


def create(plan: object) -> Session:
    session = create_session(plan, recipe_yaml="name: small\n", is_chosen=True)
    (session.run_dir / "metrics.jsonl").write_text(METRICS)
    return session


def test_status_of_a_running_run(tmp_path: Path, small_plan: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    with create(small_plan(tmp_path, steps=10)) as session:
        session.update(state=RunStatus.RUNNING, phase="rollout")
        print_status("small-1", run_root=tmp_path)
        session.finish(state=RunStatus.DONE, exit_code=0, reason="")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:-1] == [
        "run         small-1: int8 rollouts, tis with cap 2",
        "state       running",
        "phase       generating rollouts",
        "step        2 of 10, about 32 s left",
        "reward      0.350 in step 2, 0.250 in the first",
        "validation  0.200 before  (512 problems, greedy)",
        "speed       450 tokens/s of rollout (median)",
        "mismatch    fine in 1 of 2 steps",
    ]
    assert lines[-1] == f"folder      {tmp_path / 'small-1'}"


def test_status_of_a_failed_run_repeats_the_hint(
    tmp_path: Path, small_plan: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    with create(small_plan(tmp_path)) as session:
        append_event(session.run_dir, kind="failure", what="bad", error="SyncError", hint="see the log", exit_code=4)
        session.finish(state=RunStatus.FAILED, exit_code=4, reason="bad")
    print_status(str(session.run_dir), run_root=Path("elsewhere"))
    lines = capsys.readouterr().out.splitlines()
    assert "state       failed (exit code 4): bad" in lines
    assert "hint        see the log" in lines


def test_status_for_machines(tmp_path: Path, small_plan: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    with create(small_plan(tmp_path)) as session:
        session.finish(state=RunStatus.STOPPED, exit_code=130, reason="stopped by SIGINT, there was nothing to save")
    print_status("small-1", run_root=tmp_path, json_mode=True)
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1,
        "state": "stopped",
        "phase": "starting",
        "attempt": 1,
        "exit_code": 130,
        "reason": "stopped by SIGINT, there was nothing to save",
        "run_dir": str(tmp_path / "small-1"),
        "step": 2,
        "steps": 3,
        "reward_mean": 0.35,
        "val_reward_before": 0.2,
        "val_reward_mean": 0.2,
        "rewards": {},
        "val_sets": {},
        "rollout_tokens_per_s": 450.0,
        "checkpoint_steps": [],
    }


def test_unknown_run_names_those_there_are(tmp_path: Path, small_plan: Callable) -> None:
    create(small_plan(tmp_path))
    with pytest.raises(RecipeError) as caught:
        find_run("smal", run_root=tmp_path)
    assert caught.value.problems == [
        (
            "run `smal`: no folder of that path or name with a run.json",
            f"runs in {tmp_path}: small-1; or give the run's folder",
        )
    ]


def test_no_runs_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as caught:
        find_run("a", run_root=Path("runs"))
    assert caught.value.problems[0][1] == "there are no runs in ./runs; or give the run's folder"


def test_broken_run_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RecipeError) as caught:
        print_status(str(tmp_path), run_root=tmp_path)
    assert caught.value.message == (
        f"{tmp_path}: cannot be read as a run: [Errno 2] No such file or directory: '{tmp_path}/plan.json'"
    )


def test_status_names_attempts_checkpoints_and_how_to_go_on(
    tmp_path: Path, small_plan: Callable, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with create(small_plan(tmp_path)) as session:
        session.record = replace(session.record, attempt=3)
        session.finish(state=RunStatus.STOPPED, exit_code=75, reason="stopped by SIGTERM")
    for step in (4, 12):
        (session.run_dir / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
    print_status("small-1", run_root=tmp_path)
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "folder      small-1",
        "attempts    3",
        "checkpoint  global_step_12, the newest of 2",
        "to resume   appliance train small-1/recipe.yaml --resume small-1",
    ]
    print_status("small-1", run_root=tmp_path, json_mode=True)
    assert json.loads(capsys.readouterr().out)["checkpoint_steps"] == [4, 12]


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (PermissionError(13, "Permission denied"), "let this user read its files, or name another run"),
        (FileNotFoundError(2, "No such file or directory"), "name another run"),
    ],
)
def test_only_a_run_of_another_user_is_to_be_made_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, hint: str
) -> None:
    """Root may read everything: the refusal is put in the place of the file's."""
    (tmp_path / "run.json").write_text("{}")

    def refuse(path: Path, *args: object, **more: object) -> str:
        raise error

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(RecipeError) as caught:
        print_status(str(tmp_path), run_root=tmp_path)
    assert caught.value.problems[0][1] == hint


@pytest.mark.parametrize("file", ["metrics.jsonl", "events.jsonl"])
def test_what_cannot_be_read_of_a_run_is_told(tmp_path: Path, small_plan: Callable, file: str) -> None:
    """As a file of another user: a folder in its place fails for root too."""
    with create(small_plan(tmp_path)) as session:
        session.finish(state=RunStatus.DONE, exit_code=0, reason="")
    (session.run_dir / file).unlink(missing_ok=True)
    (session.run_dir / file).mkdir()
    with pytest.raises(RecipeError) as caught:
        print_status("small-1", run_root=tmp_path)
    path = session.run_dir / file
    assert caught.value.message == (f"{session.run_dir}: cannot be read as a run: [Errno 21] Is a directory: '{path}'")

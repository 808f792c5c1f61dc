"""What the folder of a run looks like when its next attempt begins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from plans import with_trainer
from stopped_runs import events, metric, recipe, resumed, save, steps_in, stopped, target_of

from appliance.errors import PreflightError, RecipeError
from appliance.launch.resume import (
    Resume,
    begin_attempt,
    find_start,
    find_target,
    is_done,
    refuse_changes,
)
from appliance.launch.train import _Training
from appliance.record.checkpoints import CheckpointSearch, owed_line
from appliance.record.events import append_event, first_failure
from appliance.record.lines import cut_lines
from appliance.record.session import RunRecord, RunStatus, read_record
from appliance.report.display import JsonProgress
from appliance.report.folder import read_run
from appliance.report.page import LivePage
from appliance.signals import Interrupts


def test_the_folder_goes_back_to_the_end_of_the_step(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    save(run_dir, 3)
    assert first_failure(run_dir) is not None
    with begin_attempt(plan, resume=resumed(run_dir), recipe_yaml="name: small\n") as session:
        assert session.log_dir == run_dir / "logs" / "2" and session.log_dir.is_dir()
    assert read_record(run_dir).attempt == 2
    assert steps_in(run_dir / "metrics.jsonl") == [0, 1, 2, 3]
    assert steps_in(run_dir / "metrics.cut-1.jsonl") == [4, 5]
    assert json.loads((run_dir / "guard.json").read_text()) == {"step": 3}
    kept = {each.name for each in (run_dir / "logs" / "1").iterdir()}
    assert kept == {"sync", "attest", "plan.json", "recipe.yaml", "versions.json"}
    assert not (run_dir / "sync").exists() and not (run_dir / "attest").exists()
    assert events(run_dir, "resume") == [("attempt 2 resumes after step 3", "")]
    assert first_failure(run_dir) is None


def test_machines_hear_where_an_attempt_goes_on(
    tmp_path: Path, small_plan: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its steps come again, and why. What was told before is no news."""
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    save(run_dir, 3)
    append_event(run_dir, kind="restart", what="restart 1 of 2", step=3)
    append_event(run_dir, kind="resume", what="of an attempt that a kill ended", step=3)
    append_event(run_dir, kind="restart", what="restart 2 of 2", step=3)
    with begin_attempt(plan, resume=resumed(run_dir), recipe_yaml="name: small\n") as session:
        training = _Training(plan, session, Interrupts(), JsonProgress(), LivePage(run_dir), saved_step=3)
        append_event(run_dir, kind="phase", what="start")
        training._tick()
        training._tick()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["type"], each["kind"], each["what"]) for each in lines] == [
        ("event", "restart", "restart 2 of 2"),
        ("event", "resume", "attempt 2 resumes after step 3"),
        ("event", "phase", "start"),
    ]
    assert [each.get("step") for each in lines] == [3, 3, None]


def test_damaged_half_written_and_later_ones_are_set_aside(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    for step in (1, 2, 3, 4, 5):
        save(run_dir, step)
    (run_dir / "checkpoints" / "global_step_5" / "data.pt").write_bytes(b"yyyyy")
    (run_dir / "checkpoints" / "partial-global_step_6").mkdir()
    target = find_target("auto", root=tmp_path, recipe_name="", name="small-1")
    begin_attempt(plan, resume=find_start(target), recipe_yaml="").release()
    assert steps_in(run_dir / "metrics.jsonl") == [0, 1, 2, 3, 4]
    named = find_target(str(run_dir / "checkpoints" / "global_step_2"), root=tmp_path, recipe_name="", name=None)
    begin_attempt(plan, resume=find_start(named), recipe_yaml="").release()
    folder = run_dir / "checkpoints"
    assert sorted(each.relative_to(folder).as_posix() for each in folder.glob("*step_*")) == [
        "global_step_1",
        "global_step_2",
    ]
    aside = sorted(each.relative_to(folder).as_posix() for each in folder.glob("*/*step_*"))
    assert aside == [
        "cut-2/global_step_3",
        "cut-2/global_step_4",
        "damaged/global_step_5",
        "damaged/partial-global_step_6",
    ]
    assert events(run_dir, "checkpoint")[:2] == [
        ("global_step_5 is damaged and set aside", "data.pt has other content than was saved"),
        ("partial-global_step_6 was half written and is set aside", ""),
    ]
    assert steps_in(run_dir / "metrics.jsonl") == [0, 1, 2]


def test_without_a_whole_checkpoint_the_run_starts_from_the_beginning(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    begin_attempt(plan, resume=resumed(run_dir), recipe_yaml="").release()
    assert steps_in(run_dir / "metrics.jsonl") == []
    assert not (run_dir / "guard.json").exists()
    assert events(run_dir, "resume") == [("attempt 2 starts from the beginning: no whole checkpoint", "")]


def test_a_folder_that_was_only_claimed_gets_its_first_attempt(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=9)
    for name in ("code", "logs/1"):
        (tmp_path / "small-1" / name).mkdir(parents=True)
    (tmp_path / "small-1" / "recipe.yaml").touch()  # its launcher died in the midst of it
    target = target_of(tmp_path / "small-1")
    assert target.record.attempt == 0
    refuse_changes(recipe(), target=target, force=False)
    begin_attempt(plan, resume=find_start(target), recipe_yaml="").release()
    assert read_record(tmp_path / "small-1").attempt == 1


@pytest.mark.parametrize("left", [b"", bytes(90)], ids=["empty", "zeros"])
def test_a_run_goes_on_whose_record_a_crash_of_the_host_left_empty(
    tmp_path: Path, small_plan: Callable, left: bytes
) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    save(run_dir, 3)
    for attempt in (2, 3):
        begin_attempt(plan, resume=resumed(run_dir), recipe_yaml="").release()
        (run_dir / "run.json").write_bytes(left)
        assert read_run(run_dir)[1] == RunRecord(RunStatus.STOPPED, attempt=attempt, reason="its launcher is gone")
    assert resumed(run_dir).step == 3


def test_the_line_of_the_last_step_waits_for_the_validation_that_was_cut(tmp_path: Path, small_plan: Callable) -> None:
    """Only the last step's, only where a validation is due and the checkpoint has the line to write again."""
    plan = small_plan(tmp_path, steps=5)
    run_dir = stopped(plan)
    folder = save(run_dir, 5, line={"step": 5, "time_s": 5.0})
    start = resumed(run_dir)
    assert owed_line(run_dir, checkpoint=folder, plan=plan) == {"step": 5, "time_s": 5.0}
    for other in (with_trainer(plan, steps=6), with_trainer(plan, validate_every=0)):
        assert owed_line(run_dir, checkpoint=folder, plan=other) is None
    assert owed_line(run_dir, checkpoint=None, plan=plan) is None
    begin_attempt(plan, resume=start, recipe_yaml="").release()
    assert steps_in(run_dir / "metrics.jsonl") == [0, 1, 2, 3, 4]
    assert owed_line(run_dir, checkpoint=folder, plan=plan) is not None
    metric(run_dir, 5, val_reward_mean=0.5)
    assert owed_line(run_dir, checkpoint=folder, plan=plan) is None
    begin_attempt(plan, resume=resumed(run_dir), recipe_yaml="").release()
    assert steps_in(run_dir / "metrics.jsonl") == [0, 1, 2, 3, 4, 5]


def test_the_line_comes_back_when_nobody_asks_for_that_validation_now(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=5)
    run_dir = stopped(plan)
    save(run_dir, 5, line={"step": 5, "time_s": 5.0})
    begin_attempt(plan, resume=resumed(run_dir), recipe_yaml="").release()
    assert steps_in(run_dir / "metrics.jsonl") == [0, 1, 2, 3, 4]  # and this attempt dies before it
    for _ in range(2):
        begin_attempt(with_trainer(plan, steps=9), resume=resumed(run_dir), recipe_yaml="").release()
        assert steps_in(run_dir / "metrics.jsonl") == [0, 1, 2, 3, 4, 5]


def test_a_last_line_without_a_copy_or_with_its_validation_stays(tmp_path: Path, small_plan: Callable) -> None:
    for name, line in (("small-1", None), ("small-2", {"step": 5, "time_s": 5.0, "val_reward_mean": 0.0})):
        plan = small_plan(tmp_path, name=name, steps=5)
        run_dir = stopped(plan)
        save(run_dir, 5, line=line)
        begin_attempt(plan, resume=resumed(run_dir), recipe_yaml="").release()
        assert steps_in(run_dir / "metrics.jsonl") == [0, 1, 2, 3, 4, 5]


def test_a_torn_line_and_a_step_that_is_there_twice_are_cut(tmp_path: Path) -> None:
    for step in (0, 1, 2, 2, 3):
        metric(tmp_path, step)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "ti')
    aside = tmp_path / "metrics.cut-7.jsonl"
    assert cut_lines(tmp_path / "metrics.jsonl", after=3, attempt=7) == aside
    assert steps_in(tmp_path / "metrics.jsonl") == [0, 1, 2, 3]
    assert aside.read_text() == '{"step": 2, "time_s": 2.0}\n{"step": 4, "ti'
    assert cut_lines(tmp_path / "metrics.jsonl", after=3, attempt=8) is None
    assert not (tmp_path / "metrics.cut-8.jsonl").exists()


def test_of_two_launchers_one_gets_the_run(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    first, second = resumed(run_dir), resumed(run_dir)
    taken = [(f"--resume: another program has just taken the run {run_dir}", "wait for its end")]
    with begin_attempt(plan, resume=first, recipe_yaml=""), pytest.raises(RecipeError) as caught:
        begin_attempt(plan, resume=second, recipe_yaml="")
    assert caught.value.problems == taken
    with pytest.raises(RecipeError) as caught:  # it ended, and the other's look is of before it
        begin_attempt(plan, resume=second, recipe_yaml="")
    assert caught.value.problems == taken
    assert read_record(run_dir).attempt == 2


def test_nothing_moves_while_what_was_killed_is_still_being_ended(
    tmp_path: Path, small_plan: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch, pytest.raises(PreflightError, match="is still ending the earlier attempt"):
        patch.setattr(
            "appliance.launch.resume.wait_for_sweep",
            MagicMock(side_effect=PreflightError("is still ending the earlier attempt")),
        )
        begin_attempt(plan, resume=resumed(run_dir), recipe_yaml="")
    after = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == {path: content for path, content in before.items() if path.name != ".lock"}
    begin_attempt(plan, resume=resumed(run_dir), recipe_yaml="").release()


def test_a_model_of_an_earlier_end_goes_aside(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan, state=RunStatus.DONE)
    (run_dir / "model").mkdir()
    (run_dir / ".model-77").mkdir()
    begin_attempt(plan, resume=Resume(target_of(run_dir), CheckpointSearch(None)), recipe_yaml="").release()
    assert (run_dir / "logs" / "1" / "model").is_dir()
    assert not (run_dir / "model").exists() and not (run_dir / ".model-77").exists()


@pytest.mark.parametrize(
    ("cut_off_at", "has_model"),
    [("_put_checkpoints_aside", True), ("versions", True), ("_tell_versions", False)],
)
def test_a_run_that_is_done_is_not_any_more_once_its_next_attempt_was_cut_off(
    tmp_path: Path, small_plan: Callable, monkeypatch: pytest.MonkeyPatch, cut_off_at: str, has_model: bool
) -> None:
    """Whether or not somebody has taken its model away."""
    plan = small_plan(tmp_path, steps=5)
    run_dir = stopped(plan, state=RunStatus.DONE)
    save(run_dir, 5)
    if has_model:
        (run_dir / "model").mkdir()
    assert is_done(target_of(run_dir), steps=5)
    longer = with_trainer(plan, steps=9)
    with monkeypatch.context() as patched, pytest.raises(PreflightError):
        patched.setattr(f"appliance.launch.resume.{cut_off_at}", MagicMock(side_effect=OSError))
        begin_attempt(longer, resume=resumed(run_dir), recipe_yaml="")
    assert not any(is_done(target_of(run_dir), steps=steps) for steps in (5, 9))
    assert read_run(run_dir)[1].reason == "attempt 2 was cut off as it began"
    begin_attempt(longer, resume=resumed(run_dir), recipe_yaml="").release()
    assert steps_in(run_dir / "metrics.jsonl") == [0, 1, 2, 3, 4, 5]


def test_another_version_is_noted(tmp_path: Path, small_plan: Callable) -> None:
    plan = small_plan(tmp_path, steps=9)
    run_dir = stopped(plan)
    begin_attempt(plan, resume=resumed(run_dir), recipe_yaml="").release()
    assert events(run_dir, "note")[-1][0].startswith("the lines of metrics.jsonl after step 0 are cut off")
    said = json.loads((run_dir / "versions.json").read_text())
    (run_dir / "versions.json").write_text(json.dumps({**said, "python": "3.10.1"}))
    begin_attempt(plan, resume=resumed(run_dir), recipe_yaml="").release()
    told = "this attempt runs with other versions than the attempt before: python"
    assert events(run_dir, "note")[-1] == (told, "versions.json has them, logs/ the earlier ones")

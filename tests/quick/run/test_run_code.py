"""The user's Python files in a run: copied, attested, and the same in every attempt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from plans import own_plan, reward_plan
from stopped_runs import resumed, save, stopped, target_of

from appliance.errors import AttestationError, RecipeError
from appliance.launch.resume import begin_attempt, with_code_of
from appliance.record.code import attested_code, copy_code
from appliance.record.plan import CodeFile, RunPlan
from appliance.record.session import create_session


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def plan(tmp_path: Path, small_plan: Callable) -> RunPlan:
    return with_code(small_plan(tmp_path / "runs"), tmp_path / "a" / "rewards.py", "one")


def with_code(plan: RunPlan, file: Path, text: str) -> RunPlan:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    code = (CodeFile(path=str(file), copy_name="rewards.py", sha256=digest(text)),)
    own = own_plan(reward_plan("f", file=file), tools=str(file), code=code)
    return plan.replace(task=plan.task.replace(kind="own", own=own))


def test_a_run_executes_its_copies(tmp_path: Path, plan: RunPlan) -> None:
    create_session(plan, recipe_yaml="", is_chosen=False).release()
    copy = Path(plan.run_dir) / "code" / "rewards.py"
    assert copy.read_text() == "one" and plan.task.own is not None
    made = plan.task.own.with_copies(plan.run_dir)
    assert (made.rewards[0].file, made.tools, made.import_path) == (str(copy), str(copy), (str(tmp_path / "a"),))
    assert attested_code(plan) == {str(tmp_path / "a" / "rewards.py"): digest("one")}
    copy.write_text("two")
    with pytest.raises(AttestationError, match=f"^{copy} is not the file that was planned$"):
        attested_code(plan)


def test_a_file_that_changed_since_it_was_planned_is_refused_and_no_folder_is_left(plan: RunPlan) -> None:
    file = Path(plan.task.own.code[0].path) if plan.task.own else Path()
    for change in (lambda: file.write_text("two"), file.unlink):
        change()
        with pytest.raises(RecipeError) as caught:
            create_session(plan, recipe_yaml="", is_chosen=False)
        assert caught.value.problems == [
            (f"{file}: it is not the file that was planned, it changed since", "start again")
        ]
        assert not Path(plan.run_dir).exists()


def test_a_resume_with_another_file_is_refused_unless_it_is_forced(tmp_path: Path, plan: RunPlan) -> None:
    run_dir = stopped(plan)
    save(run_dir, 3)
    assert with_code_of(target_of(run_dir), plan=plan, force=False, alone=False) == plan
    file = tmp_path / "a" / "rewards.py"
    other = with_code(plan, file, "two")
    with pytest.raises(RecipeError) as caught:
        with_code_of(target_of(run_dir), plan=other, force=False, alone=False)
    hint = "put it back, start a new run with another --name, or take the change with --force"
    assert caught.value.problems == [(f"{file}: it is not the file that the run began with", hint)]
    taken = with_code_of(target_of(run_dir), plan=other, force=True, alone=False)
    begin_attempt(taken, resume=resumed(run_dir), recipe_yaml="").release()
    assert (run_dir / "code" / "rewards.py").read_text() == "two" and attested_code(taken)


def test_an_attempt_that_nobody_asked_for_goes_on_with_the_copies(tmp_path: Path, plan: RunPlan) -> None:
    """Somebody who writes the next reward while a run is at work must not change it, nor end it."""
    run_dir = stopped(plan)
    save(run_dir, 3)
    file = tmp_path / "a" / "rewards.py"
    again = with_code_of(target_of(run_dir), plan=with_code(plan, file, "two"), force=True, alone=True)
    assert again == plan
    begin_attempt(again, resume=resumed(run_dir), recipe_yaml="").release()
    assert (run_dir / "code" / "rewards.py").read_text() == "one"
    told = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    what = f"{file} has changed since the run began: this attempt runs the copy in code/"
    assert [(each["what"], each["why"]) for each in told if "changed" in each["what"]] == [
        (what, f"SHA-256 {digest('one')}")
    ]


def test_a_copy_that_was_lost_is_made_again(plan: RunPlan) -> None:
    create_session(plan, recipe_yaml="", is_chosen=False).release()
    (Path(plan.run_dir) / "code" / "rewards.py").unlink()
    copy_code(plan)
    assert attested_code(plan)

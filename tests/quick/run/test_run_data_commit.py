"""A data set of the hub, `task.data`, at one commit: in the plan, in the problems' key, after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import HOST
from stopped_runs import save, stopped

from appliance.launch.resume import find_target, original_plan
from appliance.plan.build import build_plan
from appliance.preflight.report import examine, plan_in
from appliance.recipe.load import load_recipe, to_yaml
from appliance.recipe.schema import Recipe
from appliance.record.plan import RunPlan

NAME, OLD, NEW = "owner/sums", "a1" * 20, "b2" * 20


def recipe(*sets: str) -> Recipe:
    own = ("kind=own", f"data={NAME}", "prompt=question", "truth=answer", "rewards=[{name: exact}]", *sets)
    return load_recipe("arithmetic-tiny-int8", sets=[f"task.{each}" for each in own])


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the hub was asked for; `main` is the new commit."""
    requests: list[str] = []
    monkeypatch.setattr("appliance.hub.data_commit", lambda name: requests.append(name) or NEW)
    monkeypatch.setattr("appliance.hub.is_offline", lambda: False)
    monkeypatch.setattr("appliance.hub.problem", lambda: "")
    return requests


def planned(tmp_path: Path, **given: str) -> RunPlan:
    return build_plan(recipe(), run_dir=tmp_path / "small-1", host=HOST, **given)


def commit_of(plan: RunPlan) -> str:
    return plan.task_files.commit


def test_the_hub_is_asked_once_and_its_problems_have_a_key_of_their_own(tmp_path: Path, requests: list[str]) -> None:
    plan = examine(recipe(), run_dir=tmp_path / "small-1", ask_hub=True)[0]
    assert (commit_of(plan), requests) == (NEW, [NAME])
    assert plan.task_files == plan_in(tmp_path / "small-1", recipe(), host=HOST)[0].task_files
    others = {planned(tmp_path, data_commit=each).task_files.train_parquet for each in ("", OLD, NEW)}
    assert plan.task_files.train_parquet in others and len(others) == 3
    assert commit_of(examine(recipe(), run_dir=tmp_path / "small-1", ask_hub=False)[0]) == ""


@pytest.mark.parametrize("commit", [OLD, ""])
def test_a_resumed_run_keeps_the_commit_that_it_began_with(tmp_path: Path, requests: list[str], commit: str) -> None:
    """Known or not: its problems are those that it has."""
    begun = planned(tmp_path, data_commit=commit)
    run_dir = stopped(begun)
    (run_dir / "recipe.yaml").write_text(to_yaml(recipe()))
    save(run_dir, 3)
    target = find_target(str(run_dir), root=tmp_path, recipe_name="", name=None)
    assert target is not None
    plan = examine(recipe(), run_dir=run_dir, ask_hub=True, original=original_plan(target))[0]
    assert (plan.task_files, requests) == (begun.task_files, [])
    forced = examine(recipe("data=owner/other"), run_dir=run_dir, ask_hub=True, original=original_plan(target))[0]
    assert (commit_of(forced), requests) == (NEW, ["owner/other"])

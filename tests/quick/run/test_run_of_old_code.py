"""A run whose first attempt was of older code (old_run/, as commit 2cbe3c5 left it) goes on, or is refused in a
sentence. Its plan was a dataclass, with `verl`'s own correction and without half of today's fields."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from plans import HOST
from stopped_runs import events, steps_in

from appliance import console
from appliance.errors import PreflightError
from appliance.launch import command
from appliance.launch.resume import Resume, begin_attempt
from appliance.plan.build import build_plan
from appliance.preflight import report
from appliance.recipe.load import load_recipe
from appliance.recipe.schema import Recipe
from appliance.record.plan import RunPlan, read_plan
from appliance.record.session import read_record

OLD_RUN = Path(__file__).with_name("old_run")
PROBLEMS = "arithmetic-684b862f13aa"  # folder of those that it began with


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, on a host where an attempt begins and trains nothing."""

    def train(plan: RunPlan, *, recipe_yaml: str, resume: Resume, **_: object) -> int:
        begin_attempt(plan, resume=resume, recipe_yaml=recipe_yaml).release()
        return 0

    monkeypatch.setattr(command, "run_training", train)
    monkeypatch.setattr(report, "read_host", lambda root: HOST)
    return shutil.copytree(OLD_RUN, tmp_path / "small-1")


def its_recipe(run_dir: Path) -> Recipe:
    return load_recipe(str(run_dir / "recipe.yaml"), sets=[f"cluster.run_dir={run_dir.parent}"])


def resume(run_dir: Path) -> int:
    return command.run_train(
        its_recipe(run_dir), resume=str(run_dir), name=None, force=False, dry_run=False, json_mode=False, stages=()
    )


def test_a_run_of_old_code_with_other_problems_is_refused_in_a_sentence(
    run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    console.err_console.cache_clear()
    with pytest.raises(PreflightError, match="this plan cannot run here: 1 finding above"):
        resume(run_dir)
    shown = capfd.readouterr().err
    assert "task: the training problems are not those that the run began with\n" in shown
    assert "hint: put the data file or the version of this program back, or start a new run\n" in shown
    assert read_record(run_dir).attempt == 1


def test_a_run_of_old_code_goes_on_where_its_problems_are_todays(run_dir: Path) -> None:
    todays = Path(build_plan(its_recipe(run_dir), run_dir=run_dir, host=HOST).task_files.train_parquet).parent.name
    plan = run_dir / "plan.json"
    assert todays != PROBLEMS and PROBLEMS in plan.read_text()
    plan.write_text(plan.read_text().replace(PROBLEMS, todays))
    assert resume(run_dir) == 0
    assert read_record(run_dir).attempt == 2
    assert Path(read_plan(run_dir / "plan.json").resume_from).name == "global_step_3"
    assert events(run_dir, "resume") == [("attempt 2 resumes after step 3", "")]
    assert steps_in(run_dir / "metrics.jsonl") == [0, 1, 2, 3]
    assert json.loads((run_dir / "logs/1/plan.json").read_text())["argv"][2] == "appliance.trainer.entry"

"""A comparison of recipes with a task of the user's own: the same problems and the same rewards in all arms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from appliance.compare.arms import Existing, PlannedRun, look_at_run, plan_runs
from appliance.compare.file import load_comparison
from appliance.errors import RecipeError
from appliance.recipe.load import to_yaml
from appliance.record.session import RunStatus, create_session

RECIPE = """
model: {builtin: tiny-arithmetic}
task:
  kind: own
  train_file: d.jsonl
  prompt: question
  truth: answer
  max_prompt_tokens: 16
  max_response_tokens: 6
  rewards: [{name: rewards.py:f}]
batch: {prompts_per_step: 4}
rollout: {scheme: int8}
cluster: {device: cpu}
trainer: {steps: 1}
"""
TEXT = """\
recipe: r.yaml
arms:
  a:
  b: {SETTINGS}
seeds: [0]
baseline: a
validation: 16
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{number} + 1?", "answer": number + 1} for number in range(32)]
    Path("d.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("r.yaml").write_text(RECIPE)
    Path("rewards.py").write_text("def f(response, truth): return float(response == truth)")
    return tmp_path


def planned(settings: str = "rollout.scheme: bf16") -> list[PlannedRun]:
    Path("c.yaml").write_text(TEXT.replace("SETTINGS", settings))
    return plan_runs(load_comparison("c.yaml"))


def test_arms_of_an_own_task_share_problems_and_rewards(folder: Path) -> None:
    first, second = planned()
    assert first.plan.task == second.plan.task and first.plan.task.val_size == 16
    assert first.plan.rollout.scheme != second.plan.rollout.scheme


def test_the_margin_is_in_the_unit_of_the_rewards(folder: Path) -> None:
    Path("c.yaml").write_text(TEXT + "margin: 5\n")
    assert load_comparison("c.yaml").margin == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            "task.rewards: [{name: exact}]",
            ("c.yaml:4: arms.b: it is judged by other rewards", "`task.rewards` must be as in the arm `a`"),
        ),
        (
            "task.prompt: answer, task.template: null",
            (
                "c.yaml:4: arms.b: it validates on other problems",
                "`task` and the model's tokenizer must be as in the arm `a` (own)",
            ),
        ),
        (
            "model.builtin: tiny-calculator, task.tools: rewards.py",
            (
                "c.yaml:4: task.tools: "
                "in the final validation of a comparison the model speaks once, and calls nothing",
                "compare a recipe without tools",
            ),
        ),
    ],
)
def test_what_cannot_be_compared_is_told(folder: Path, settings: str, problem: tuple[str, str]) -> None:
    Path("d.jsonl").write_text(Path("d.jsonl").read_text().replace('"answer": ', '"answer": "1').replace("}", '"}'))
    with pytest.raises(RecipeError) as caught:
        planned(settings)
    assert caught.value.problems == [problem]


def test_several_validations_are_not_compared(folder: Path) -> None:
    Path("r.yaml").write_text(RECIPE.replace("  truth", "  val_sets: {all: {size: 9}}\n  truth"))
    with pytest.raises(RecipeError) as caught:
        planned()
    message = "r.yaml:7: task.val_sets: a comparison validates once, on `validation` problems that all arms share"
    hint = "compare a recipe without them: task.val_file may be the file of one of them"
    assert caught.value.problems == [(message, hint)]


@pytest.mark.slow
def test_a_run_with_other_code_is_another_one(folder: Path) -> None:
    run = planned()[0]
    with create_session(run.plan, recipe_yaml=to_yaml(run.recipe), is_chosen=False) as session:
        session.finish(state=RunStatus.DONE, exit_code=0, reason="")
    assert look_at_run(planned()[0]) is Existing.DONE
    (folder / "rewards.py").write_text("def f(response, truth): return 2 * float(response == truth)")
    assert look_at_run(planned()[0]) is Existing.OTHER

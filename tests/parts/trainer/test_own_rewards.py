"""The rewards of a recipe of the user's own as a run grades with them: from its folder, in the pool, in all forms."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from plans import HOST

from appliance.plan.build import build_plan
from appliance.recipe.load import load_recipe
from appliance.record.plan import RunPlan
from appliance.record.session import create_session
from appliance.tasks.grading import Fault, Graded
from appliance.tasks.library import task_of
from appliance.tasks.task import Response
from appliance.trainer.rewards import pool_for

RECIPE = """
name: own
model: {builtin: tiny-arithmetic}
task:
  kind: own
  train_file: d.jsonl
  prompt: question
  truth: answer
  reward_workers: 1
  reward_timeout_s: 20
  max_prompt_tokens: 8
  max_response_tokens: 6
  rewards:
    - {name: number}
    - {name: "rewards.py:ours", weight: 0.5}
    - {name: "rewards.py:trls", weight: 0.25}
    - {name: "rewards.py:compute_score", weight: 0.125}
cluster: {device: cpu}
trainer: {steps: 1}
"""
PROGRAM = """
import sys, os
from beside import strip

def ours(response, truth, *, row):
    print("to stdout", flush=True)
    if response == "die":
        os._exit(4)
    if response == "torch":
        import torch
    return float(strip(response) == truth and row["level"] == 3)

def trls(prompts, completions, answer, **columns):
    return [None if completion == "skip" else float(completion == a) for completion, a in zip(completions, answer)]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "other": "x"}
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPlan:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "rewards.py").write_text(PROGRAM)
    (tmp_path / "beside.py").write_text("def strip(text): return text.strip()")
    (tmp_path / "d.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "2", "level": 3}))
    made = build_plan(load_recipe("recipe.yaml"), run_dir=tmp_path / "runs" / "own-1", host=HOST)
    create_session(made, recipe_yaml="", is_chosen=True).release()
    return made


def test_a_run_grades_with_the_copies_of_its_files(plan: RunPlan, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("raise ValueError('the original, which somebody is writing')")
    (problem,) = task_of(plan.task, files=plan.task_files).first_problems(
        1, file=plan.task.train_file, difficulty=2, seed=0
    )
    pool = pool_for(plan)

    async def graded(*texts: str) -> list[Graded]:
        responses = (Response(text, problem.truth, problem.row, token_ids=(1,)) for text in texts)
        return list(await asyncio.gather(*map(pool.grade, responses)))

    try:
        right, spaced, wrong, skipped, dead, last = asyncio.run(graded("2", " 2", "3", "skip", "die", "torch"))
    finally:
        pool.close()
    names = ("number", "ours", "trls", "compute_score")
    assert (right.accuracy, right.parts) == (1.875, tuple((name, 1.0) for name in names))
    assert (spaced.accuracy, wrong.accuracy, last.accuracy) == (1.5, 0.0, 0.0)
    assert [name for name, _ in skipped.parts] == ["number", "ours", "compute_score"]
    assert (dead.fault, last.fault, pool.faults.total()) == (Fault.DIED, None, 1)


def test_a_process_that_begins_later_runs_no_other_copy(plan: RunPlan) -> None:
    copy = Path(plan.run_dir) / "code" / "0-rewards.py"
    row = json.dumps({"question": "1+1?", "answer": "2", "level": 3})
    pool = pool_for(plan)

    async def graded() -> tuple[Graded, ...]:
        first = await pool.grade(Response("2", "2", row))
        copy.write_text(PROGRAM.replace('row["level"] == 3', "True"))
        return first, *[await pool.grade(Response(text, "2", row)) for text in ("die", "2")]

    try:
        first, died, later = asyncio.run(graded())
    finally:
        pool.close()
    assert [each.fault for each in (first, died, later)] == [None, Fault.DIED, Fault.RAISED]
    assert later.why == f"UserCodeError: {copy}: it is not the file that was planned: it has changed since"

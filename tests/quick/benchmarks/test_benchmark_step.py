"""The step benchmark: which systems it measures, what it leaves out, and that its recipe is one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from appliance.recipe.load import load_recipe
from benchmarks.step.__main__ import OLD, SYSTEMS, chosen, page, summary, write_problems, write_recipe

STEP = {"step_s": 20.0, "response_tokens_mean": 10.0, "rollout_s": 5.0, "update_s": 14.0}


@pytest.mark.parametrize(
    ("asked", "old", "systems"),
    [(None, None, list(SYSTEMS)), (None, "abc", ["ours", OLD]), ("trl, ours", None, ["trl", "ours"])],
)
def test_the_systems_are_those_asked_for(asked: str | None, old: str | None, systems: list[str]) -> None:
    assert chosen(asked, old=old) == systems


def test_a_page_has_each_system_beside_ours() -> None:
    ours = summary("ours", number=0, lines=[STEP, STEP | {"step_s": 30.0}], busy=0.0)
    trl = summary("trl", number=0, lines=[{"step_s": 50.0, "response_tokens_mean": 12.0}], busy=0.5)
    document = {"measured": [asdict(ours), asdict(trl)], "old": None, "micro_batch": 32, "checkpointing": False}
    text = page({**document, "date": "2026-11-29", "processor": "a CPU", "cores": 2, "python": "3.11"})
    assert "| ours | 25.0 | 20.0 to 30.0 | 1.00 | 10.0 | 5.0 | - | 14.0 | - |" in text
    assert "| trl | ~50.0 | 50.0 to 50.0 | 2.00 | 12.0 | - | - | - | - |" in text


def test_its_recipe_is_read_and_its_problems_are_there(tmp_path: Path) -> None:
    problems = write_problems(tmp_path / "problems.jsonl")
    recipe = load_recipe(str(write_recipe(tmp_path / "recipe.json", model=tmp_path, problems=problems, steps=3)))
    assert len(problems.read_text().splitlines()) > 2000
    assert (recipe.trainer.steps, recipe.batch.prompts_per_step, recipe.rollout.samples_per_prompt) == (3, 16, 8)

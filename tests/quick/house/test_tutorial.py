"""What docs/tutorial.md has one type: its files are made, and are what the page says of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.recipe.load import load_recipe


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs/tutorial.md").read_text()


@pytest.fixture
def folder(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the page, in the folder where the program is started. Each begins with its name."""
    for text in re.findall(r"^```(?:python|yaml)\n(.*?)^```", page, re.M | re.S):
        (tmp_path / re.match(r"# (\S+)\n", text)[1]).write_text(text)
    subprocess.run([sys.executable, "make_problems.py"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_files_have_the_rows_that_the_page_shows(page: str, folder: Path) -> None:
    lines = {name: (folder / name).read_text().splitlines() for name in ("problems.jsonl", "unseen.jsonl")}
    assert "\n".join(lines["problems.jsonl"][:2]) in page
    asked = {name: {json.loads(line)["question"] for line in rows} for name, rows in lines.items()}
    train, unseen = asked.values()
    assert f"{len(lines['problems.jsonl'])} rows, {len(train)} distinct problems" in page
    assert f"{len(lines['unseen.jsonl'])} rows, {len(unseen)} distinct problems" in page
    assert f"{len(train & unseen)} problems are in the validation data as well" in page
    assert f"{len(train - unseen)} to train on, 200 to validate" in page


def test_the_recipe_is_one(page: str, folder: Path) -> None:
    recipe = load_recipe("recipe.yaml")
    steps, prompts = recipe.trainer.steps, recipe.batch.prompts_per_step
    shown = f"{recipe.name}-1: {steps} steps of {prompts} prompts x {recipe.rollout.samples_per_prompt} samples"
    assert shown in page
    assert f"rollouts in {recipe.rollout.scheme}; {recipe.correction.method} with cap 2" in page
    assert [reward.name for reward in recipe.task.rewards] == ["number", "rewards.py:is_short"]


def test_the_reward_gives_what_its_docstring_says(folder: Path) -> None:
    names: dict[str, object] = {}
    exec((folder / "rewards.py").read_text(), names)
    assert [names["is_short"]("x" * length, "1") for length in (0, 40, 60, 80, 99)] == [1.0, 1.0, 0.5, 0.0, 0.0]


def test_the_last_script_is_python(folder: Path) -> None:
    compile((folder / "ask.py").read_text(), "ask.py", "exec")

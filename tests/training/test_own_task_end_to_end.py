"""A task of the user's own, as a user would have it: a folder with rows, rewards and a recipe. Real vLLM, verl, Ray."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from three_forms import EXAMPLE, REWARDS, data_of
from trainings import Finished, command

from appliance.files import digest_of

pytestmark = pytest.mark.e2e


def train_in(folder: Path, *sets: str, root: Path, name: str, timeout_s: float = 900) -> Finished:
    """As `appliance train recipe.yaml` in that folder."""
    line = command(root, *sets, name=name, recipe="recipe.yaml")
    done = subprocess.run(line, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=folder)
    return Finished(done.returncode, done.stdout, done.stderr, root / name, ())


def test_the_example_learns_with_int8_rollouts(with_tiny_cache: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(EXAMPLE, tmp_path / "own-task")
    root = with_tiny_cache(tmp_path)
    began = time.monotonic()
    done = train_in(folder, root=root, name="own")
    took_s = time.monotonic() - began
    assert done.code == 0, done.stderr[-4000:]
    lines = done.json_lines("metrics.jsonl")
    before, after = lines[0]["val_reward_mean"], lines[-1]["val_reward_mean"]
    sys.stdout.write(f"own task: {before:.3f} before, {after:.3f} after {lines[-1]['step']} steps, {took_s:.0f} s\n")
    assert before <= 0.10 and after >= 0.90
    assert {line["scheme"] for line in lines} == {"int8"}
    assert lines[0]["val_samples"] == 512


def test_three_forms_of_one_task_are_the_same_run(with_tiny_cache: Callable[[Path], Path], tmp_path: Path) -> None:
    root, seen = with_tiny_cache(tmp_path), {}
    (tmp_path / "recipe.yaml").write_text((EXAMPLE / "recipe.yaml").read_text())
    short = ("trainer.steps=3", "trainer.validate_every=3", "task.val_file=null", "task.val_size=64")
    for form, code in REWARDS.items():
        (tmp_path / f"{form}.py").write_text(code)
        usual = {"prompt": "prompt", "truth": "null", "rewards": f"[{{name: {form}.py:right}}]"}
        task = usual | data_of(form, tmp_path)
        sets = [f"task.{key}={value}" for key, value in task.items()]
        done = train_in(tmp_path, *short, *sets, root=root, name=form)
        assert done.code == 0, done.stderr[-4000:]
        seen[form] = (
            [
                {key: value for key, value in line.items() if not is_time(key)}
                for line in done.json_lines("metrics.jsonl")
            ],
            [without_truth(line) for line in done.json_lines("samples.jsonl")],
            [digest_of(file) for file in sorted((done.run_dir / "model").glob("*.safetensors"))],
        )
    assert [line["step"] for line in seen["ours"][0]] == [0, 1, 2, 3] and seen["ours"][2]
    assert seen["trls"] == seen["ours"]
    assert seen["verls"] == seen["ours"]


def is_time(key: str) -> bool:
    """Or something else of the host that is another one each time."""
    return key.endswith(("_s", "_bytes", "_gb", "_gib")) or "memory" in key


def without_truth(line: dict[str, Any]) -> dict[str, Any]:
    """TRL's rows have none: their columns go to the function."""
    return line | {
        kind: [{key: value for key, value in each.items() if key != "truth"} for each in line.get(kind, ())]
        for kind in ("validation", "training")
    }

"""A task of the user's own, as a user would have it: a folder with rows, rewards and a recipe. Real vLLM, verl, Ray."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from trainings import Finished, command

pytestmark = pytest.mark.e2e

EXAMPLE = Path(__file__).parents[2] / "examples" / "own-task"
MOST_SECONDS = 240  # on two cores, without the making of the model
TIMES = ("time_s", "_s", "tokens_per_s")


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
    assert took_s < MOST_SECONDS

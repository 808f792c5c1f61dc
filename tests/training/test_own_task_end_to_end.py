"""A task of the user's own, as a user would have it: a folder with rows, rewards and a recipe. Real vLLM, verl, Ray."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from three_forms import EXAMPLE
from trainings import LEARNED_WITHIN_S, Finished, command, processor_s

pytestmark = [pytest.mark.e2e(minutes=3), pytest.mark.long]


def test_the_example_learns_with_int8_rollouts(with_tiny_cache: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(EXAMPLE, tmp_path / "own-task")
    root = with_tiny_cache(tmp_path)
    before_s = processor_s()  # the model is made
    line = command(root, name="own", recipe="recipe.yaml")
    ended = subprocess.run(line, capture_output=True, text=True, timeout=900, check=False, cwd=folder)
    done = Finished(ended.returncode, ended.stdout, ended.stderr, root / "own", ())
    used_s = processor_s() - before_s
    assert done.code == 0, done.stderr[-4000:]
    lines = done.json_lines("metrics.jsonl")
    before, after = lines[0]["val_reward_mean"], lines[-1]["val_reward_mean"]
    took = f"{lines[-1]['time_s']:.0f} s, {used_s:.0f} s of processors"
    sys.stdout.write(f"own task: {before:.3f} before, {after:.3f} after {lines[-1]['step']} steps, {took}\n")
    assert before <= 0.10 and after >= 0.90
    assert {line["scheme"] for line in lines} == {"int8"}
    assert lines[0]["val_samples"] == 512
    assert 0 < used_s < LEARNED_WITHIN_S

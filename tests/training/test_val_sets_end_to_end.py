"""A task of one's own with two validations, one of which draws samples. Real vLLM, verl and Ray."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from killable import Run

pytestmark = pytest.mark.e2e

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own-task"
REWARDS = [
    {"name": f"{EXAMPLE / 'rewards.py'}:right_sum"},
    {"name": f"{EXAMPLE / 'rewards.py'}:only_digits", "weight": 0.1},
]
SETS = {"unseen": {"file": str(EXAMPLE / "unseen.jsonl"), "size": 16, "samples": 4}, "held_out": {"size": 24}}
RECIPE = {
    "task.kind": "own",
    "task.train_file": str(EXAMPLE / "problems.jsonl"),
    "task.prompt": "question",
    "task.truth": "answer",
    "task.rewards": json.dumps(REWARDS),
    "task.val_sets": json.dumps(SETS),
    "task.val_size": "512",
    "task.train_size": "0",
    "trainer.steps": "2",
    "trainer.validate_before": "true",
    "trainer.validate_every": "1",
    "optimizer.learning_rate": "2e-4",
}
NAMES = {
    *(f"val/unseen/{metric}" for metric in ("avg@4", "pass@1", "pass@2", "pass@4")),
    *(f"val/held_out/{metric}" for metric in ("avg@1", "pass@1")),
}


def of_validation(run: Run) -> list[dict[str, float]]:
    """What each line says of its validation and its rewards, but how long it took."""
    starts = ("val_", "val/", "reward")
    return [{key: line[key] for key in line if key.startswith(starts)} for line in run.lines("metrics.jsonl")]


def test_two_validations_are_told_by_name(new_run: Callable[..., Run]) -> None:
    """That a resumed run says the same: test_torture_resume.py."""
    whole = new_run("whole", **RECIPE)
    whole.start()
    assert whole.end() == 0, whole.said[-3000:]
    before, *steps = of_validation(whole)
    assert {key for key in before if key.startswith("val/")} == NAMES and len(steps) == 2
    for line in steps:
        assert {key for key in line if key.startswith("val/")} == NAMES
        assert line["reward_mean"] == pytest.approx(line["reward/right_sum"] + 0.1 * line["reward/only_digits"])
        assert (line["val_reward_mean"], line["val_samples"]) == (line["val/unseen/avg@4"], 16)
        assert line["val/unseen/pass@1"] < line["val/unseen/pass@2"] < line["val/unseen/pass@4"] <= 1
        assert (line["val/held_out/pass@1"] * 24) % 1 == pytest.approx(0)  # one sample each
    assert len({line["val/unseen/avg@4"] for line in (before, *steps)}) > 1
    page = (whole.run_dir / "report.html").read_text()
    assert "unseen avg@4" in page and "unseen pass@4" in page and "right_sum" in page

"""What measuring costs of a step, out of a run's own numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from appliance.errors import TrainingError
from benchmarks.telemetry import ABOUT, Where, cost_of, write


def write_steps(folder: Path, *steps: tuple[int, float, float]) -> Path:
    lines = [json.dumps({"step": step, "telemetry_s": spent, "step_s": whole}) for step, spent, whole in steps]
    validation = json.dumps({"step": 0, "val_reward_mean": 0.5})
    (folder / "metrics.jsonl").write_text("\n".join([validation, *lines]) + "\n")
    return folder


def test_the_share_is_taken_step_by_step_without_the_first(tmp_path: Path) -> None:
    """Shares 1, 2 and 0.5 %: their median, and not the ratio of the medians, which is 0.67 %."""
    run = write_steps(tmp_path, (1, 1.0, 1.0), (2, 0.01, 1.0), (3, 0.04, 2.0), (4, 0.02, 4.0))
    assert cost_of(run).text == (
        "3 steps: measuring 20.0 ms, a step 2000 ms, share 1.00% (0.50% to 2.00%), not below 1%"
    )
    assert cost_of(write_steps(tmp_path, (2, 0.009, 1.0))).text.endswith("0.90% (0.90% to 0.90%), below 1%")


@pytest.mark.parametrize(("busy", "warns"), [(0.02, ""), (0.5, ", so its times are no measurement")])
def test_the_page_has_every_step_and_says_beside_what_it_was_taken(tmp_path: Path, busy: float, warns: str) -> None:
    cost = cost_of(write_steps(tmp_path, (1, 1.0, 1.0), (2, 0.01, 1.0), (3, 0.04, 2.0)))
    where = Where(date="2026-11-22", processor="a processor", cores=2, recipe="a-recipe", busy=busy)
    write(tmp_path / "results", cost=cost, where=where)
    kept = json.loads((tmp_path / "results" / "telemetry.json").read_text())
    assert kept["steps"] == [
        {"step": 2, "telemetry_s": 0.01, "step_s": 1.0},
        {"step": 3, "telemetry_s": 0.04, "step_s": 2.0},
    ]
    assert (tmp_path / "results" / "telemetry.md").read_text().splitlines()[2:] == [
        *ABOUT,
        "",
        "Made by `python -m benchmarks.telemetry -o docs/results`; [telemetry.json](telemetry.json) has every number.",
        f"Taken on 2026-11-22: a processor, 2 cores, of which others used {busy:.0%} before{warns}.",
        "",
        f"Recipe `a-recipe`, medians of {cost.text}.",
        "",
        "| step | measuring, ms | step, ms | share |",
        "| --- | --- | --- | --- |",
        "| 2 | 10.0 | 1000 | 1.00% |",
        "| 3 | 40.0 | 2000 | 2.00% |",
    ]


def test_a_run_without_a_second_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="has no step after the first"):
        cost_of(write_steps(tmp_path, (1, 0.01, 1.0)))

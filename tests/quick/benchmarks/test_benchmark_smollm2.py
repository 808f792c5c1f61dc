"""The row of docs/results/smollm2.md that a run's folder gives."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.errors import TrainingError
from appliance.record.session import RunRecord, RunStatus, write_record
from benchmarks.smollm2 import HEAD, cells, main, read_row

ROOT = Path(__file__).parents[3]


def as_lines(lines: list[dict]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def run(tmp_path: Path, small_plan: Callable) -> Path:
    """A run of 25 steps of 8 samples, validated before it and after step 25."""
    plan = small_plan(tmp_path, steps=25).replace(seed=1)
    run_dir = Path(plan.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "plan.json").write_text(plan.to_json())
    write_record(run_dir, RunRecord(RunStatus.DONE, phase="done", attempt=1, exit_code=0))
    steps = [
        {"step": step, "time_s": 60.0 * step, "scheme": "int8", "response_tokens_mean": 4.0, "mismatch_k3_kl": k3}
        for step, k3 in enumerate([0.011, 0.013, *[0.012] * 18, *[0.5] * 5], start=1)
    ]
    before = {"step": 0, "time_s": 9.0, "scheme": "int8", "val_reward_mean": 0.14, "val_samples": 200}
    steps[-1] |= {"val_reward_mean": 0.815, "val_samples": 200}
    (run_dir / "metrics.jsonl").write_text(as_lines([before, *steps]))
    (run_dir / "memory.jsonl").write_text(as_lines([{"pss_bytes": size} for size in (1e9, 7.1e9, 3e9)]))
    return run_dir


def test_a_row_has_what_its_folder_says(run: Path) -> None:
    row = read_row(run)
    samples_of_a_step = row.samples // 25
    assert dict(zip(HEAD, cells(row, loaded=True), strict=True)) == {
        "seed": "1",
        "rollouts": "int8",
        "steps": "25",
        "samples": f"{25 * samples_of_a_step:,}",
        "tokens": f"{100 * samples_of_a_step:,}",
        "greedy before": "0.140",
        "greedy after": "0.815",
        "curve": "0: 0.140, 25: 0.815",
        "k3, median": "0.0120",  # of the first 20 steps
        "k3, most": "0.0130",
        "minutes": "~25",
        "memory, GB": "7.1",
    }


def test_a_run_that_was_ended_early_says_so(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:4]) + "\n")
    (run / "memory.jsonl").unlink()
    shown = dict(zip(HEAD, cells(read_row(run), loaded=False), strict=True))
    keys = ("steps", "greedy before", "greedy after", "minutes", "memory, GB")
    assert [shown[key] for key in keys] == ["3 of 25", "0.140", "-", "3", "-"]
    (run / "metrics.jsonl").write_text(lines[0] + "\n")
    with pytest.raises(TrainingError, match="it has no step"):
        read_row(run)


def test_the_page_s_tables_have_the_columns_of_a_row(run: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["smollm2", str(run), "--head"])
    assert main() == 0
    head, *_ = capsys.readouterr().out.splitlines()
    assert head in (ROOT / "docs" / "results" / "smollm2.md").read_text().splitlines()

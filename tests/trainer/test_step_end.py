"""The end of a step in our trainer: its line is written, judged, remembered and saved. verl's part is left out, and so
are the numbers; the checkpoints are real."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plans
import pytest
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from appliance.plan.model import CheckpointPlan
from appliance.quant.precision import AS_PLANNED
from appliance.quant.scheme import Scheme
from appliance.run.checkpoints import checkpoint_folder
from appliance.run.seal import read_manifest
from appliance.trainer import watched
from appliance.trainer.checkpoints import Checkpoints
from appliance.trainer.precision import Live, PrecisionState
from appliance.trainer.stoppable import StoppableTrainer

AS_BEFORE = PrecisionState("int8", AS_PLANNED, AS_PLANNED, Scheme.INT8, 0.0)
VALIDATED = {"val_reward_mean": 0.5, "val_reward_bf16_mean": 0.25, "val_samples": 8}


def trainer_of(run_dir: Path, *, said: list[Any]) -> StoppableTrainer:
    """In its third step of three. said: gets what the other parts are told."""
    plan = replace(plans.make_plan(run_dir, steps=3), checkpoint=CheckpointPlan(keep_best=True))
    made = object.__new__(StoppableTrainer)  # verl's own __init__ wants its whole configuration, and GPUs
    made.plan, made.run_dir = plan, run_dir
    made.global_steps = made.total_training_steps = 3
    made.checkpoints = Checkpoints(plan, save_workers=lambda folder, step: None, data_state=dict)
    made._started = 0.0
    made._telemetry = SimpleNamespace(mismatch=None, seconds=0.5, metrics=lambda: {"mismatch_chi2": float("inf")})
    made._correction = SimpleNamespace(metrics=dict, token_cap=2.0)
    made._step_sync = SimpleNamespace()
    made._rolled = Live("int8", emulated=False)
    made._governed = SimpleNamespace(metrics=dict, after_step=lambda signals: None, measures="measures")
    made._precision = SimpleNamespace(want=said.append, state=AS_BEFORE)
    made._validation = dict(VALIDATED)
    made._rollouts = None
    made._reward_failures = 2
    made._stop_after_step = None
    made._engine_restart_s = 1.5
    made._stopping = SimpleNamespace(note_saved=said.append, note_finished=said.append, check=lambda: None)
    return made


def test_the_line_of_a_step_is_in_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PPOTrainerSync, "_compute_metrics", lambda self, *_, **__: None)
    monkeypatch.setattr(watched, "step_metrics", lambda *_, step, **__: {"step": step, "telemetry_s": 0.25})
    monkeypatch.setattr(watched, "signals_of", lambda *_, **__: None)
    said: list[Any] = []
    trainer = trainer_of(tmp_path, said=said)
    sent: dict[str, Any] = {}
    trainer._compute_metrics(None, sent, {}, global_steps=3, epoch=0)
    (line,) = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    numbers = {key: value for key, value in line.items() if isinstance(value, int | float)}
    assert sent == {f"appliance/{key}": value for key, value in numbers.items()}
    assert {"time_s", "reward_failures"} <= numbers.keys()
    assert line.pop("time_s") > 0
    assert line == {
        **{"step": 3, "telemetry_s": 0.75, "mismatch_chi2": None, "reward_failures": 2},
        "engine_restart_s": 1.5,
        **Live("int8", emulated=False).metrics(),
        **VALIDATED,
    }
    folder = checkpoint_folder(tmp_path, step=3)
    kept = json.loads((folder / "state.json").read_text())["line"]
    assert kept.pop("time_s") > 0 and kept == line
    assert read_manifest(folder).facts.val_reward == 0.5
    assert said == ["measures", 3, 3] and trainer._validation == {}

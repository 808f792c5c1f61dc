"""A stop in the validation of the last step: the next attempt has no step to make, and makes that validation again.
verl's own validation is a number here; all of ours around it is real."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import plans
import pytest
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from appliance.errors import GuardStop
from appliance.run.checkpoints import checkpoint_folder
from appliance.trainer.precision import Live
from appliance.trainer.stoppable import StoppableTrainer
from appliance.trainer.stopping import StopAsked

LINE = {"step": 4, "time_s": 9.5, "reward_mean": 0.25, "reward_failures": 3, "grad_norm": None}


@pytest.fixture
def written() -> list[tuple[int, str]]:
    """(step, scheme) of each line of samples."""
    return []


@pytest.fixture
def trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[tuple[int, str]]
) -> Callable[..., StoppableTrainer]:
    """A trainer after verl's loop, which had no step to make after step 4. rollouts: in BF16, so that one is enough."""
    monkeypatch.setattr(PPOTrainerSync, "_validate", lambda self: {"val-core/arithmetic/reward/mean@1": 0.75})
    folder = checkpoint_folder(tmp_path, step=4)
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"schema_version": 1, "step": 4, "line": LINE}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "time_s": 8.0}\n')

    def make(*, steps: int = 4, asked: bool = False, failed: GuardStop | None = None) -> StoppableTrainer:
        made = object.__new__(StoppableTrainer)  # verl's own __init__ wants its whole configuration, and GPUs
        made.run_dir = tmp_path
        made.plan = plans.make_plan(tmp_path, steps=steps).replace(resume_from=str(folder))
        made.global_steps = 5
        made._validation = {}
        samples = SimpleNamespace(write=lambda step, scheme: written.append((step, scheme)))
        pool = SimpleNamespace(graded=0, faults={}, last_fault=None)
        made._rollouts = SimpleNamespace(validated=512, pool=pool, samples=samples)
        made._precision = SimpleNamespace(live=Live("bf16", emulated=False))
        made._stop_after_step = None
        made._reward_faults = SimpleNamespace(end=_raising(failed))
        made._stopping = SimpleNamespace(check=_raising(StopAsked() if asked else None), finished=4)
        made.checkpoints = SimpleNamespace(save_now=lambda reason: None)
        return made

    return make


def _raising(error: Exception | None) -> Callable[..., int]:
    def call(*_: object, **__: object) -> int:
        if error is not None:
            raise error
        return 0

    return call


def lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_last_step_gets_its_validation(
    tmp_path: Path, trainer: Callable[..., StoppableTrainer], written: list[tuple[int, str]]
) -> None:
    trainer().on_train_end()
    before, last = lines(tmp_path)
    assert before["step"] == 3 and last.pop("validate_s") >= 0
    assert last == {**LINE, "val_reward_mean": 0.75, "val_reward_bf16_mean": 0.75, "val_samples": 0}
    trainer().on_train_end()
    assert len(lines(tmp_path)) == 2
    assert written == [(4, "bf16")]


def test_a_run_with_more_steps_has_no_last_one_to_write(
    tmp_path: Path, trainer: Callable[..., StoppableTrainer]
) -> None:
    trainer(steps=5).on_train_end()
    assert len(lines(tmp_path)) == 1


def test_stopped_in_it_again_it_is_left_for_the_next_attempt(
    tmp_path: Path, trainer: Callable[..., StoppableTrainer]
) -> None:
    with pytest.raises(StopAsked):
        trainer(asked=True).on_train_end()
    assert len(lines(tmp_path)) == 1


def test_rewards_that_fail_in_it_stop_the_run(tmp_path: Path, trainer: Callable[..., StoppableTrainer]) -> None:
    with pytest.raises(GuardStop):
        trainer(failed=GuardStop("too many")).on_train_end()
    assert lines(tmp_path)[-1]["val_reward_mean"] == 0.75

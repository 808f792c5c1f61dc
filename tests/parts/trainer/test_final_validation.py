"""A stop in the validation of the last step: the next attempt has no step to make, and makes that validation again.
verl's own validation is a number here; all of ours around it is real."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from plans import make_plan, make_rollout
from trainers import make_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from appliance.errors import GuardStop
from appliance.record.checkpoints import checkpoint_folder
from appliance.tasks.grading import Fault
from appliance.terms.schemes import Scheme
from appliance.trainer.stopping import StopAsked
from appliance.trainer.trainer import ApplianceTrainer

LINE = {"step": 4, "time_s": 9.5, "scheme": "int8", "reward_mean": 0.25, "reward_failures": 3, "grad_norm": None}
Resumed = Callable[..., ApplianceTrainer]


def raising(error: Exception | None) -> Callable[[], None]:
    def check() -> None:
        if error is not None:
            raise error

    return check


@pytest.fixture
def written() -> list[str]:
    """(step, scheme, the validation's) of each line of samples."""
    return []


@pytest.fixture
def resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[str]) -> Resumed:
    """A trainer that goes on after step 4, whose validation a stop has cut, and comes to the end of verl's loop. With
    rollouts in BF16, so that one validation is enough. failed: rewards, of 512."""
    monkeypatch.setattr(PPOTrainerSync, "_validate", lambda self: {"val-core/arithmetic/reward/mean@1": 0.75})
    folder = checkpoint_folder(tmp_path, step=4)
    folder.mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "time_s": 8.0}\n')

    def make(*, steps: int = 4, stop: Exception | None = None, failed: int = 0) -> ApplianceTrainer:
        plan = make_plan(tmp_path, steps=steps, rollout=make_rollout(Scheme.BF16))
        stopping = SimpleNamespace(check=raising(stop), is_requested=False, finished=4)
        samples = SimpleNamespace(
            write=lambda step, scheme, val_scheme: written.append(f"{step} {scheme} {val_scheme}")
        )
        faults = Counter({Fault.RAISED: failed} if failed else {})
        pool = SimpleNamespace(graded=512, faults=faults, last_fault=None)
        grades = SimpleNamespace(num_validated=512, set_metrics=dict)
        checkpoints = SimpleNamespace(save_now=lambda reason: None)
        rollouts = SimpleNamespace(grades=grades, pool=pool, samples=samples)
        made = make_trainer(plan, stopping=stopping, global_steps=5, rollouts=rollouts, checkpoints=checkpoints)
        made.plan = plan.replace(resume_from=str(folder))
        return made

    (folder / "state.json").write_text(json.dumps({"schema_version": 1, "step": 4, "line": LINE}))
    return make


def lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_last_step_gets_its_validation(tmp_path: Path, resumed: Resumed, written: list[str]) -> None:
    resumed().on_train_end()
    before, last = lines(tmp_path)
    assert before["step"] == 3 and last.pop("validate_s") >= 0
    validated = {"val_reward_mean": 0.75, "val_reward_bf16_mean": 0.75, "val_samples": 0, "val_scheme": "bf16"}
    assert last == {**LINE, **validated}
    resumed().on_train_end()
    assert len(lines(tmp_path)) == 2
    assert written == ["4 int8 bf16"]


def test_a_run_with_more_steps_has_no_last_one_to_write(tmp_path: Path, resumed: Resumed) -> None:
    resumed(steps=5).on_train_end()
    assert len(lines(tmp_path)) == 1


def test_stopped_in_it_again_it_is_left_for_the_next_attempt(tmp_path: Path, resumed: Resumed) -> None:
    with pytest.raises(StopAsked):
        resumed(stop=StopAsked()).on_train_end()
    assert len(lines(tmp_path)) == 1


def test_rewards_that_fail_in_it_stop_the_run(tmp_path: Path, resumed: Resumed) -> None:
    with pytest.raises(GuardStop, match="500 of 512 rewards of the validation of step 4 failed"):
        resumed(failed=500).on_train_end()
    assert lines(tmp_path)[-1]["val_reward_mean"] == 0.75

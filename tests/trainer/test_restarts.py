"""When our trainer has rollout engines started anew, and when not. Engines and verl's part are left out; what is wanted
of them is the real RolloutPrecision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plans import make_plan, make_rollout
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from appliance.guard.ladder import Measures
from appliance.plan.model import Switching
from appliance.quant.precision import AS_PLANNED
from appliance.quant.scheme import Scheme
from appliance.run.generation import Generation
from appliance.trainer.precision import BF16, Live, RolloutPrecision
from appliance.trainer.stoppable import StoppableTrainer
from appliance.trainer.stopping import StopAsked

PLANNED = Measures(Scheme.INT8, bf16_layer_fraction=0.0, tight=False, stop=False)
TOP = replace(PLANNED, scheme=Scheme.BF16, bf16_layer_fraction=1.0)
VALIDATED = {"val-core/arithmetic/reward/mean@1": 0.75}
Make = Callable[..., StoppableTrainer]


@pytest.fixture
def said() -> list[str]:
    """What happened, in order: `start int8` of engines, `update int8` of engines that are so, `validate`, `save`."""
    return []


@pytest.fixture
def trainer(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> Make:
    def validate(self: StoppableTrainer) -> dict[str, float]:
        said.append("validate")
        return VALIDATED

    monkeypatch.setattr(PPOTrainerSync, "_validate", validate)

    def make(*, step: int, asked: bool = False, every: int = 0, way: Switching = Switching.RESTART) -> StoppableTrainer:
        """In a step of 4, with engines as planned. asked: to stop.  every: steps between validations in BF16."""
        plan = make_plan(tmp_path, steps=4, validate_bf16_every=every, rollout=make_rollout(Scheme.INT8))
        made = object.__new__(StoppableTrainer)  # verl's own __init__ wants its whole configuration, and GPUs
        made.plan, made.run_dir = replace(plan, guard=replace(plan.guard, switching=way)), tmp_path
        made.global_steps, made.total_training_steps = step, 4
        made._precision = RolloutPrecision(made.plan)
        made._precision.want(PLANNED)
        made._engines = SimpleNamespace(generation=Generation())

        def restart(*, why: str) -> None:
            made._engines.generation = Generation(made._precision.starts_in)
            said.append(f"start {scheme()}")

        def scheme() -> str:
            return str(made._engines.generation.precision.scheme or "int8")

        def took() -> None:
            wanted = made._precision.wanted.scheme or "int8"
            assert way is Switching.LIVE or str(wanted) == scheme()  # else the real one raises SyncError
            made._precision.live = Live(str(wanted), emulated=False)

        made._restart_engines, made._check_sync = restart, took
        made.checkpoint_manager = SimpleNamespace(update_weights=lambda step: said.append(f"update {scheme()}"))
        made.checkpoints = SimpleNamespace(end_step=lambda line, precision, is_last: None, save_now=save)
        made._rollouts = SimpleNamespace(validated=0)
        made._stop_after_step = None
        made._stopping = SimpleNamespace(asked=asked, check=stop if asked else lambda: None, finished=step)
        made._check_every_sync()
        return made

    def save(reason: str) -> None:
        said.append(f"save: {reason}")

    def stop() -> None:
        raise StopAsked

    return make


def test_engines_start_when_another_precision_is_wanted_and_not_before(trainer: Make, said: list[str]) -> None:
    made = trainer(step=1)
    made.checkpoint_manager.update_weights(1)
    made._precision.want(TOP)
    made.checkpoint_manager.update_weights(1)
    made.checkpoint_manager.update_weights(1)
    assert said == ["update int8", "start bf16", "update bf16", "update bf16"]


def test_a_run_that_stops_ends_its_step_with_the_engines_it_has(trainer: Make, said: list[str]) -> None:
    made = trainer(step=1, asked=True)
    made._precision.want(TOP)
    made.checkpoint_manager.update_weights(1)
    assert said == ["update int8"]
    assert made._precision.wanted == BF16  # by the attempt that goes on


@pytest.mark.parametrize("way", Switching)
def test_a_run_that_stops_begins_no_validation_in_bf16(trainer: Make, said: list[str], way: Switching) -> None:
    made = trainer(step=1, asked=True, every=1, way=way)
    with pytest.raises(StopAsked):
        made._validate_bf16(VALIDATED)
    assert said == []


def test_a_stop_just_before_the_engines_are_in_bf16_leaves_that_validation_out(trainer: Make, said: list[str]) -> None:
    made = trainer(step=1, asked=True, every=1)
    made._stopping.check = lambda: None  # not yet
    assert made._validate_bf16(VALIDATED) is None
    assert said == ["update int8"]


@pytest.mark.parametrize("step", [3, 4])
def test_a_validation_in_bf16_has_engines_started_there_and_back_but_not_at_the_end(
    trainer: Make, said: list[str], step: int
) -> None:
    made = trainer(step=step, every=1)
    assert made._validate_bf16(VALIDATED) == 0.75
    back = ["start int8", "update int8"] if step == 3 else []
    assert said == ["start bf16", "update bf16", "validate", *back]


def test_live_engines_go_back_at_the_end_too(trainer: Make, said: list[str]) -> None:
    made = trainer(step=4, every=1, way=Switching.LIVE)
    assert made._validate_bf16(VALIDATED) == 0.75
    assert said == ["update int8", "validate", "update int8"]
    assert made._precision.live.label == "int8"


SAVED = ["save: new rollout engines are next"]


@pytest.mark.parametrize(
    ("given", "wanted", "present", "saves"),
    [
        ({"step": 1}, PLANNED, AS_PLANNED, []),
        ({"step": 1}, TOP, AS_PLANNED, SAVED),
        ({"step": 1}, TOP, BF16, []),
        ({"step": 1}, PLANNED, BF16, SAVED),
        ({"step": 1, "every": 2}, PLANNED, AS_PLANNED, SAVED),  # step 2 is validated in BF16
        ({"step": 2, "every": 2}, PLANNED, AS_PLANNED, []),
        ({"step": 1, "every": 2}, TOP, BF16, []),
        ({"step": 1, "every": 2}, TOP, AS_PLANNED, SAVED),
        ({"step": 1, "every": 2, "way": Switching.LIVE}, TOP, AS_PLANNED, []),
    ],
)
def test_the_step_before_new_engines_is_saved(
    trainer: Make, said: list[str], given: dict[str, Any], wanted: Measures, present: Any, saves: list[str]
) -> None:
    made = trainer(**given)
    made._precision.want(wanted)
    made._engines.generation = Generation(present)
    made._end_step({"step": given["step"]}, stop_for=None)
    assert said == saves

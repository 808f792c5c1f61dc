"""What stands around a weight update: engines started anew when it takes new ones, and the proof of every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from plans import make_plan, make_rollout
from proving_engine import ProvingEngine

from appliance.errors import SyncError
from appliance.guard.governor import Measures
from appliance.settings.sections import SchemeChange
from appliance.sync.precision import write_generation
from appliance.sync.records import Sent, append_sent
from appliance.terms.schemes import AS_PLANNED, Precision, Scheme
from appliance.trainer.engines import RolloutEngines
from appliance.trainer.precision import BF16, RolloutPrecision, Validation, WeightUpdates
from appliance.trainer.stopping import StopAsked

PLANNED = Measures(Scheme.INT8, bf16_layer_fraction=0.0, tight=False)
TOP = replace(PLANNED, scheme=Scheme.BF16, bf16_layer_fraction=1.0)


class Parts:
    """Of a run of 4 steps, with engines as planned. log: what happened, in order: `start int8` of engines, `update
    int8` of engines that are so, `validate`."""

    def __init__(self, run_dir: Path, *, is_leaving: bool = False, every: int = 0, way: SchemeChange) -> None:
        """is_leaving: asked to stop.  every: steps between validations in BF16."""
        plan = make_plan(run_dir, steps=4, validate_bf16_every=every, rollout=make_rollout(Scheme.INT8))
        plan = plan.replace(guard=plan.guard.replace(scheme_change=way))
        self.run_dir, self.log, self.may_validate = run_dir, list[str](), True
        self.precision = RolloutPrecision(plan)
        self.precision.want(PLANNED)
        self.engines = RolloutEngines(run_dir, on_death=lambda error: None)
        self.updates = WeightUpdates(
            plan,
            precision=self.precision,
            engines=self.engines,
            restart=self._restart,
            attest=lambda: self.log.append("attest"),
            is_leaving=lambda: is_leaving,
        )
        self.engine = ProvingEngine(run_dir, way=way, log=self.log)
        self.update = self.updates.proven(self.engine.update)
        self._validation = Validation(plan, precision=self.precision, check_stop=self._check_stop)

    def _restart(self, why: str) -> None:
        """As the trainer does, without engines."""
        expected = self.precision.starts_in
        self.engines.generation = self.engines.generation.next(expected, after_sync=self.updates.count)
        write_generation(self.run_dir, self.engines.generation)
        self.log.append(f"start {expected.scheme or 'int8'}")

    def _check_stop(self) -> None:
        if not self.may_validate:
            raise StopAsked

    def validate(self, step: int, *, sets: tuple[dict[str, float], ...] = ()) -> dict[str, float | None]:
        """sets: of the first and of the second validation, those of several sets."""

        def validate() -> dict[str, float]:
            self.log.append("validate")
            return {"val-core/arithmetic/reward/mean@1": 0.75}

        def by_set() -> dict[str, float]:
            return sets[self.log.count("validate") - 1] if sets else {}

        means = self._validation.make(
            validate, step=step, problems=lambda: 0, update=lambda: self.update(step), by_set=by_set
        )
        assert means == (sets[0] if sets else {"val-core/arithmetic/reward/mean@1": 0.75})
        return self._validation.take()


@pytest.fixture
def parts(tmp_path: Path) -> Callable[..., Parts]:
    return lambda way=SchemeChange.RESTART, **given: Parts(tmp_path, way=way, **given)


def test_engines_start_when_another_precision_is_wanted_and_not_before(parts: Callable[..., Parts]) -> None:
    parts_of_run = parts()
    parts_of_run.update(1)
    parts_of_run.precision.want(TOP)
    parts_of_run.update(1)
    parts_of_run.update(1)
    assert parts_of_run.log == ["update int8", "start bf16", "update bf16", "update bf16"]
    assert parts_of_run.updates.count == 3 and parts_of_run.precision.live.label == "bf16"


def test_live_engines_are_asked_and_none_starts(parts: Callable[..., Parts]) -> None:
    parts_of_run = parts(SchemeChange.LIVE)
    parts_of_run.precision.want(TOP)
    parts_of_run.update(1)
    parts_of_run.update(1)
    assert parts_of_run.log == ["update bf16", "attest", "update bf16"]  # layers that changed say so once


def test_a_run_that_stops_ends_its_step_with_the_engines_it_has(parts: Callable[..., Parts]) -> None:
    parts_of_run = parts(is_leaving=True)
    parts_of_run.precision.want(TOP)
    parts_of_run.update(1)
    assert parts_of_run.log == ["update int8"]
    assert parts_of_run.precision.target == BF16  # by the attempt that goes on


def test_an_update_that_no_engine_proved_is_an_error(parts: Callable[..., Parts]) -> None:
    update = parts().updates.proven(lambda step: step)
    with pytest.raises(
        SyncError, match="weight update 1: the trainer sent rollout rank 0 of replica 0 nothing"
    ) as raised:
        update(0)
    assert raised.value.exit_code == 4


def test_an_engine_that_took_other_weights_is_an_error(parts: Callable[..., Parts]) -> None:
    parts_of_run = parts()

    def update(step: int) -> None:
        parts_of_run.engine.update(step)
        append_sent(parts_of_run.run_dir, Sent(sync=1, replica=0, rank=0, manifest="abc", digest_s=0.1))

    with pytest.raises(SyncError, match="took the weights ab, was sent abc"):
        parts_of_run.updates.proven(update)(0)


def test_each_update_must_be_proven_anew(parts: Callable[..., Parts]) -> None:
    parts_of_run = parts()
    parts_of_run.update(0)
    assert parts_of_run.updates.last.acknowledgements[0].manifest == "ab"
    with pytest.raises(SyncError, match="weight update 2: "):
        parts_of_run.updates.proven(lambda step: step)(1)


@pytest.mark.parametrize("way", [SchemeChange.LIVE, SchemeChange.RESTART])
def test_a_run_that_stops_begins_no_validation_in_bf16(parts: Callable[..., Parts], way: SchemeChange) -> None:
    parts_of_run = parts(way, every=1)
    parts_of_run.may_validate = False
    with pytest.raises(StopAsked):
        parts_of_run.validate(1)
    assert parts_of_run.log == ["validate"]


def test_a_stop_just_before_the_engines_are_in_bf16_leaves_that_validation_out(parts: Callable[..., Parts]) -> None:
    parts_of_run = parts(is_leaving=True, every=1)
    means = {"val_reward_mean": 0.75, "val_reward_bf16_mean": None}
    assert parts_of_run.validate(1) == {**means, "val_samples": 0, "val_scheme": "int8"}
    assert parts_of_run.log == ["validate", "update int8"]


def test_of_several_validations_the_first_counts_in_each_precision(parts: Callable[..., Parts]) -> None:
    sets = ({"val/a/avg@2": 0.25, "val/b/avg@1": 9.0}, {"val/a/avg@2": 0.5, "val/b/avg@1": 8.0})
    means = {"val_reward_mean": 0.25, "val_reward_bf16_mean": 0.5, "val_samples": 0, "val_scheme": "int8"}
    assert parts(every=1).validate(4, sets=sets) == {**means, **sets[0]}


@pytest.mark.parametrize("step", [3, 4])
def test_a_validation_in_bf16_has_engines_started_there_and_back_but_not_at_the_end(
    parts: Callable[..., Parts], step: int
) -> None:
    parts_of_run = parts(every=1)
    assert parts_of_run.validate(step)["val_reward_bf16_mean"] == 0.75
    back = ["start int8", "update int8"] if step == 3 else []
    assert parts_of_run.log == ["validate", "start bf16", "update bf16", "validate", *back]


def test_live_engines_go_back_at_the_end_too(parts: Callable[..., Parts]) -> None:
    parts_of_run = parts(SchemeChange.LIVE, every=1)
    assert parts_of_run.validate(4)["val_reward_bf16_mean"] == 0.75
    assert parts_of_run.log == ["validate", "update bf16", "attest", "validate", "update int8", "attest"]
    assert parts_of_run.precision.live.label == "int8"


def test_a_validation_in_bf16_that_is_not_due_is_not_made(parts: Callable[..., Parts]) -> None:
    made = parts(every=2)
    assert made.validate(3)["val_reward_bf16_mean"] is None
    assert made.log == ["validate"]


@pytest.mark.parametrize(
    ("step", "every", "way", "expected", "present", "restarts"),
    [
        (1, 0, SchemeChange.RESTART, PLANNED, AS_PLANNED, False),
        (1, 0, SchemeChange.RESTART, TOP, AS_PLANNED, True),
        (1, 0, SchemeChange.RESTART, TOP, BF16, False),
        (1, 0, SchemeChange.RESTART, PLANNED, BF16, True),
        (2, 2, SchemeChange.RESTART, PLANNED, AS_PLANNED, True),  # it is validated in BF16
        (3, 2, SchemeChange.RESTART, PLANNED, AS_PLANNED, False),
        (2, 2, SchemeChange.RESTART, TOP, BF16, False),
        (2, 2, SchemeChange.RESTART, TOP, AS_PLANNED, True),
        (2, 2, SchemeChange.LIVE, TOP, AS_PLANNED, False),
    ],
)
def test_it_is_known_which_steps_have_engines_started(
    parts: Callable[..., Parts],
    step: int,
    every: int,
    way: SchemeChange,
    expected: Measures,
    present: Precision,
    restarts: bool,
) -> None:
    made = parts(way, every=every)
    made.precision.want(expected)
    assert made.precision.restarts_in(step, present=present) is restarts

"""The precision of a resumed run's rollouts: step by step that of a run which nobody stopped. verl's parts and the
engines are left out; governor, what is wanted, checkpoints and the order of their calls are the real ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plans import make_checkpoint, make_guard, make_plan
from proving_engine import LAYERS, PROVEN, TOOK, ProvingEngine
from trainers import make_trainer

from appliance.guard.policy import Action
from appliance.guard.signals import Signals
from appliance.record.checkpoints import checkpoint_folder
from appliance.record.plan import RunPlan
from appliance.settings.sections import SchemeChange
from appliance.sync.precision import write_generation
from appliance.sync.records import Acknowledgement, SyncRecord, add_layer_errors, layer_errors_file
from appliance.terms.schemes import AS_PLANNED, Precision, Scheme
from appliance.trainer import trainer as room
from appliance.trainer.checkpoints import read_state
from appliance.trainer.governor import Governor
from appliance.trainer.precision import BF16, PrecisionState, RolloutPrecision
from appliance.trainer.trainer import ApplianceTrainer

GUARD = make_guard(actions=(Action.RAISE_PRECISION, Action.BF16), bad_steps=1, cooling_steps=0, fine_steps=1)
K3 = (1.0, 1.0, 1.0, 0.0, 0.01, 0.0, 0.01, 0.0)  # of steps 1 to 8: three up, one down, and with the first relapse waits


class Data(tuple):
    def state_dict(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Rolled:
    """What the rollouts of a step were made in, and what the governor stood on."""

    step: int
    requested: Precision
    scheme: str
    bf16_layers: int
    level: str


class Run:
    """Of eight steps, each one saved. Attempts of it start with the model or after any step."""

    def __init__(self, run_dir: Path, way: SchemeChange, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run_dir, self.way = run_dir, way
        self._attempts = 0
        self.guard = GUARD
        run_dir.mkdir()
        (run_dir / "metrics.jsonl").touch()
        for name in ("attest_driver", "attest_trainers", "check_attested", "take_settings"):
            monkeypatch.setattr(room, name, lambda *_, **__: None)
        self.attested: list[list[str]] = []  # by which workers, for each update with which layers changed
        monkeypatch.setattr(room, "attest_switch", lambda _, *, workers: self.attested.append(workers))
        monkeypatch.setattr(ApplianceTrainer, "_restart_engines", restart)
        monkeypatch.setattr(room.BatchCorrection, "install", lambda *_, **__: None)

    def plan(self, *, after: int) -> RunPlan:
        return make_plan(
            self.run_dir,
            steps=len(K3),
            guard=self.guard.replace(scheme_change=self.way),
            checkpoint=make_checkpoint(every_steps=1, keep=len(K3)),
            resume_from=str(checkpoint_folder(self.run_dir, step=after)) if after else "",
        )

    def attempt(
        self, *, after: int = 0, then: Callable[[ApplianceTrainer], None] = lambda trainer: None
    ) -> list[Rolled]:
        """then: once the engines have their first weights."""
        if (sync := self.run_dir / "sync").exists():  # as launch/resume.py does, and below
            shutil.move(sync, self.run_dir / "logs" / str(self._attempts) / "sync")
        self._attempts += 1
        if after:
            shutil.copyfile(checkpoint_folder(self.run_dir, step=after) / "guard.json", self.run_dir / "guard.json")
            for later in range(after + 1, len(K3) + 1):
                shutil.rmtree(checkpoint_folder(self.run_dir, step=later), ignore_errors=True)
        engine = ProvingEngine(self.run_dir, way=self.way, log=[])
        stopping = SimpleNamespace(is_requested=False, check=lambda: None, end_step=lambda step, saved: None)
        trainer = make_trainer(
            self.plan(after=after),
            stopping=stopping,
            global_steps=after,
            train_dataloader=Data(),
            actor_rollout_wg=SimpleNamespace(workers=["worker"]),
            llm_server_manager=SimpleNamespace(server_handles=[]),
            checkpoint_manager=SimpleNamespace(update_weights=self._drifting(engine)),
            _save_workers=lambda folder, step: None,
        )
        trainer.on_init_end()
        trainer.engines.stop_watching()
        then(trainer)
        trainer.on_train_begin()
        rolled = []
        for step in range(after + 1, len(K3) + 1):
            trainer.global_steps, trainer.timing_raw = step, {}
            live = trainer.precision.live
            rolled.append(Rolled(step, engine.brought, live.label, live.bf16_layers, trainer.governor.level))
            trainer.on_step_end()
            trainer._end_step({"step": step}, signals=Signals(step, k3_kl=K3[step - 1]))
        return rolled

    def _drifting(self, engine: ProvingEngine) -> Callable[[int], None]:
        """At each step other layers are the worst."""

        def update(step: int) -> None:
            engine.update(step)
            errors = {name: (index + step) % 4 + 1.0 for index, name in enumerate(LAYERS)}
            add_layer_errors(layer_errors_file(self.run_dir, replica=0, rank=0), errors)

        return update


def restart(trainer: ApplianceTrainer, why: str) -> None:
    """As the trainer does, without engines."""
    engines = trainer.engines
    engines.generation = engines.generation.next(trainer.precision.starts_in, after_sync=trainer.updates.count)
    write_generation(trainer.run_dir, engines.generation)


@pytest.fixture(params=[SchemeChange.LIVE, SchemeChange.RESTART])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path / "run", request.param, monkeypatch)


def test_a_resumed_run_rolls_out_as_one_that_nobody_stopped(run: Run) -> None:
    whole = run.attempt()
    assert [(each.scheme, each.bf16_layers) for each in whole[:7]] == [
        *[("int8", 0)] * 2,
        ("int8", 1),
        ("int8", 2),
        ("bf16", 4),
        ("int8", 2),
        ("int8", 2),
    ]
    changes = sum(
        one.requested != other.requested for one, other in pairwise(whole)
    )  # of live engines: new ones say all anew
    assert run.attested == [["worker"]] * (changes if run.way is SchemeChange.LIVE else 0)
    for after in reversed(range(1, len(K3))):  # each time from a checkpoint of the whole run
        assert run.attempt(after=after) == whole[after:]


def test_a_validation_before_the_first_step_leaves_the_rollouts_as_they_were(run: Run) -> None:
    """In BF16, and back to what the run had: of a resume with `trainer.validate_before`."""
    whole = run.attempt()

    def validate(trainer: ApplianceTrainer) -> None:
        with trainer.precision.meanwhile(BF16):
            trainer.checkpoint_manager.update_weights(2)
        trainer.checkpoint_manager.update_weights(2)

    assert run.attempt(after=2, then=validate) == whole[2:]


def change_state(run: Run, *, after: int, **changes: Any) -> None:
    file = checkpoint_folder(run.run_dir, step=after) / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_checkpoint_keeps_what_its_rollouts_were_made_in(run: Run) -> None:
    run.attempt()
    kept = read_state(checkpoint_folder(run.run_dir, step=2)).precision
    assert (kept.rollouts, kept.bf16_layer_fraction) == (Precision(bf16_layers=("c",)), 0.5)


def test_what_was_kept_of_another_scheme_says_nothing(run: Run) -> None:
    """`--force` with another `rollout.scheme`: its engines cannot have what was kept."""
    run.attempt()
    kept = json.loads((checkpoint_folder(run.run_dir, step=2) / "state.json").read_text())["precision"]
    change_state(
        run, after=2, precision={**kept, "planned": "fp8", "rollouts": {"scheme": "fp8-block", "bf16_layers": []}}
    )
    assert run.attempt(after=2)[0].bf16_layers == 2


def test_what_was_kept_under_another_guard_says_nothing(run: Run) -> None:
    """A resume may change it: this one keeps its hands off the rollouts from the first step on."""
    whole = run.attempt()
    assert (whole[3].bf16_layers, whole[4].scheme) == (2, "bf16")
    run.guard = GUARD.replace(actions=(Action.WARN,))
    assert [(each.scheme, each.bf16_layers) for each in run.attempt(after=3)] == [("int8", 0)] * 5


def test_a_run_that_the_guard_stopped_goes_on_with_what_the_guard_asks_for(run: Run) -> None:
    """Not with rollouts that it was stopped for."""
    run.attempt()
    guard = checkpoint_folder(run.run_dir, step=1) / "guard.json"
    stop = {"rung": "stop", "scheme": "bf16", "bf16_layer_fraction": 1.0}
    guard.write_text(json.dumps({**json.loads(guard.read_text()), "level": stop}))
    assert run.attempt(after=1)[0].scheme == "bf16"


def test_a_step_that_a_stop_ended_otherwise_goes_on_as_it_was_to(run: Run) -> None:
    """Asked to stop, a step ends in the engines it has: the next attempt starts those that were wanted."""
    plan = run.plan(after=0)
    precision = RolloutPrecision(plan)
    saved_state = PrecisionState("int8", BF16, AS_PLANNED, Scheme.INT8, 0.0)
    add_layer_errors(layer_errors_file(run.run_dir, replica=0, rank=0), dict.fromkeys(LAYERS, 0.1))
    precision.begin(Governor(plan).measures, saved=saved_state)
    with precision.meanwhile(AS_PLANNED):
        said = {"sync": 1, "replica": 0, "rank": 0, "manifest": "", "layers": 4, "scheme": "int8"}
        precision.took(SyncRecord(sent=(), acknowledgements=(Acknowledgement(**said, **PROVEN, **TOOK),)))
    assert precision.state == saved_state


@pytest.mark.parametrize("precision", [None, {}, {"planned": "int8", "rollouts": []}, []])
def test_a_state_that_is_none_is_refused(run: Run, precision: Any) -> None:
    run.attempt()
    change_state(run, after=2, precision=precision)
    with pytest.raises(ValueError, match=r"state\.json: precision.* is not one that this program writes"):
        read_state(checkpoint_folder(run.run_dir, step=2))

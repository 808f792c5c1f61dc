"""The precision of a resumed run's rollouts: step by step that of a run which nobody stopped. verl's parts and the
engines are left out; governor, what is wanted, checkpoints and the order of their calls are the real ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plans import make_plan
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from appliance.guard.policy import Action
from appliance.guard.signals import Signals
from appliance.plan.model import CheckpointPlan, GuardPlan, Switching
from appliance.quant.precision import AS_PLANNED, Precision
from appliance.quant.scheme import Scheme
from appliance.run.acknowledge import Acknowledgement, SyncRecord, add_layer_errors, layer_errors_file
from appliance.run.checkpoints import checkpoint_folder
from appliance.run.precision import read_wanted
from appliance.trainer import watched
from appliance.trainer.checkpoints import read_state
from appliance.trainer.precision import BF16, PrecisionState, RolloutPrecision
from appliance.trainer.watched import WatchedTrainer

GUARD = GuardPlan(actions=(Action.RAISE_PRECISION, Action.BF16), bad_steps=1, cooling_steps=0, fine_steps=1)
K3 = (1.0, 1.0, 1.0, 0.0, 0.01, 0.0, 0.01, 0.0)  # of steps 1 to 8: three up, one down, and with the first relapse waits
LAYERS = ("a", "b", "c", "d")
SAID = {"tensors": 1, "bytes": 1, "layers": 4, "layers_proven": 4, "parameters_proven": 1, "unproven": 0, "switched": 0}
TOOK = {"waiting_bytes": 0, "digest_s": 0.0, "proof_s": 0.0, "seconds": 0.0, "telemetry": None}


class Data(tuple):
    def state_dict(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Rolled:
    """What the rollouts of a step were made in, and what the governor stood on."""

    step: int
    asked: Precision
    scheme: str
    bf16_layers: int
    level: str


class Run:
    """Of eight steps, each one saved. Attempts of it start with the model or after any step."""

    def __init__(self, run_dir: Path, way: Switching, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run_dir, self._way, self._restarts = run_dir, way, way is Switching.RESTART
        self._brought = AS_PLANNED
        self.guard = GUARD
        run_dir.mkdir()
        (run_dir / "metrics.jsonl").touch()
        for name in ("attest_driver", "attest_trainers", "EngineWatch"):
            monkeypatch.setattr(watched, name, lambda *_, **__: None)
        monkeypatch.setattr(watched.BatchCorrection, "install", lambda *_, **__: None)
        monkeypatch.setattr(watched, "signals_of", lambda line, **_: Signals(line["step"], k3_kl=K3[line["step"] - 1]))

        def init(self: WatchedTrainer, config: Any) -> None:
            self.replay_buffer = SimpleNamespace(refill_fn=None)

        monkeypatch.setattr(PPOTrainerSync, "__init__", init)

    def trainer(self, *, after: int) -> WatchedTrainer:
        resume_from = str(checkpoint_folder(self.run_dir, step=after)) if after else ""
        plan = make_plan(
            self.run_dir,
            steps=len(K3),
            guard=replace(self.guard, switching=self._way),
            checkpoint=CheckpointPlan(every_steps=1, keep=len(K3)),
            resume_from=resume_from,
        )
        made = WatchedTrainer(config=None, plan=plan, on_engine_death=lambda error: None)
        made.global_steps, made.total_training_steps = after, len(K3)
        made.train_dataloader = Data()
        made.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(actor=None))
        made.actor_rollout_wg = SimpleNamespace(workers=[])
        made.llm_server_manager = SimpleNamespace(server_handles=[])
        made.checkpoint_manager = SimpleNamespace(update_weights=lambda step: step)
        made._save_workers = lambda folder, step: None
        made._check_attestations = lambda: None
        made._restart_engines = lambda *, why: restart(made)
        made._check_sync = lambda: self._check_sync(made)
        return made

    def _check_sync(self, trainer: WatchedTrainer) -> None:
        """The engines' answer: what they were asked for, or were started in. Errors drift: at each step other layers
        are the worst."""
        asked = trainer._engines.generation.precision if self._restarts else read_wanted(self.run_dir)
        self._brought = asked
        raised = 4 if asked == BF16 else len(asked.bf16_layers)
        said = Acknowledgement(
            **{"sync": 1, "replica": 0, "rank": 0, "manifest": "", "bf16_layers": raised},
            **{"scheme": str(asked.scheme or Scheme.INT8), **SAID, **TOOK},
        )
        errors = {name: (index + trainer.global_steps) % 4 + 1.0 for index, name in enumerate(LAYERS)}
        add_layer_errors(layer_errors_file(self.run_dir, replica=0, rank=0), errors)
        trainer._precision.took(SyncRecord(sent=(), acknowledgements=(said,)))

    def attempt(self, *, after: int = 0, then: Callable[[WatchedTrainer], None] = lambda trainer: None) -> list[Rolled]:
        """then: once the engines have their first weights."""
        if after:  # as run/attempt.py does
            shutil.copyfile(checkpoint_folder(self.run_dir, step=after) / "guard.json", self.run_dir / "guard.json")
            for later in range(after + 1, len(K3) + 1):
                shutil.rmtree(checkpoint_folder(self.run_dir, step=later), ignore_errors=True)
        trainer = self.trainer(after=after)
        trainer.on_init_end()
        then(trainer)
        trainer.on_train_begin()
        rolled = []
        for step in range(after + 1, len(K3) + 1):
            trainer.global_steps, trainer.timing_raw = step, {}
            live = trainer._precision.live
            rolled.append(Rolled(step, self._brought, live.label, live.bf16_layers, trainer._governed.level))
            trainer.on_step_end()
            decision = trainer._govern({"step": step}, telemetry=None)
            trainer._end_step({"step": step}, stop_for=decision)
        return rolled


def restart(trainer: WatchedTrainer) -> None:
    trainer._engines.generation = trainer._engines.generation.next(trainer._precision.starts_in, after_sync=1)


@pytest.fixture(params=Switching)
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
    for after in reversed(range(1, len(K3))):  # each time from a checkpoint of the whole run
        assert run.attempt(after=after) == whole[after:]


def test_a_validation_before_the_first_step_leaves_the_rollouts_as_they_were(run: Run) -> None:
    """In BF16, and back to what the run had: of a resume with `trainer.validate_before`."""
    whole = run.attempt()

    def validate(trainer: WatchedTrainer) -> None:
        with trainer._precision.meanwhile(BF16):
            trainer.checkpoint_manager.update_weights(2)
        trainer.checkpoint_manager.update_weights(2)

    assert run.attempt(after=2, then=validate) == whole[2:]


def change_state(run: Run, *, after: int, **changes: Any) -> None:
    file = checkpoint_folder(run.run_dir, step=after) / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_checkpoint_of_an_older_version_resumes_with_the_decision(run: Run) -> None:
    run.attempt()
    state = json.loads((checkpoint_folder(run.run_dir, step=2) / "state.json").read_text())
    assert (state["precision"]["rollouts"], state["precision"]["bf16_layer_fraction"]) == (
        {"scheme": None, "bf16_layers": ["c"]},
        0.5,
    )
    change_state(run, after=2, precision=None)
    assert read_state(checkpoint_folder(run.run_dir, step=2)).precision is None
    assert run.attempt(after=2)[0].bf16_layers == 2


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
    run.guard = replace(GUARD, actions=(Action.WARN,))
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
    trainer = run.trainer(after=0)
    precision = RolloutPrecision(trainer.plan)
    kept = PrecisionState("int8", BF16, AS_PLANNED, Scheme.INT8, 0.0)
    add_layer_errors(layer_errors_file(run.run_dir, replica=0, rank=0), dict.fromkeys(LAYERS, 0.1))
    precision.begin(trainer._governed.measures, kept=kept)
    with precision.meanwhile(AS_PLANNED):
        said = {"sync": 1, "replica": 0, "rank": 0, "manifest": "", "bf16_layers": 0, "scheme": "int8"}
        precision.took(SyncRecord(sent=(), acknowledgements=(Acknowledgement(**said, **SAID, **TOOK),)))
    assert precision.state == kept
    assert PrecisionState.from_raw(json.loads(json.dumps(asdict(kept)))) == kept


@pytest.mark.parametrize("raw", [{}, {"planned": "int8", "rollouts": []}, []])
def test_a_state_that_is_none_is_refused(raw: Any) -> None:
    with pytest.raises(ValueError, match="not a "):
        PrecisionState.from_raw(raw)

"""What our trainer asks for before the first rollout: every attestation, and the proof of every weight update. verl's
parts are left out; attestations, acknowledgements and their judges are the real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from plans import make_plan
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from appliance.errors import AttestationError, SyncError
from appliance.plan.model import ExpectedAttestation
from appliance.quant.precision import AS_PLANNED
from appliance.quant.scheme import Scheme
from appliance.run.attest import Attestation, fingerprint, write_attestation
from appliance.run.generation import Generation
from appliance.run.sync_records import Acknowledgement, Sent, append_acknowledgement, append_sent
from appliance.trainer import watched
from appliance.trainer.watched import WatchedTrainer

PINS = (("verl", "0.9.1"),)


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WatchedTrainer:
    """With everything set up, as it is when verl calls `on_init_end`. Its weight updates reach no engine."""
    expected = (ExpectedAttestation("rollout", 0, Scheme.INT8, ()),)
    made = object.__new__(WatchedTrainer)  # verl's own __init__ wants its whole configuration, and GPUs
    made.plan, made.run_dir = make_plan(tmp_path, attestations=expected, pins=PINS), tmp_path
    made.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(actor=None))
    made.actor_rollout_wg = SimpleNamespace(workers=[])
    made.llm_server_manager = SimpleNamespace(server_handles=[])
    made.checkpoint_manager = SimpleNamespace(update_weights=lambda step: step)
    made._on_engine_death = made._rollouts = None
    made._open_checkpoints = lambda: None
    made._clipping = SimpleNamespace(install=lambda workers, actor: None)
    made._precision = SimpleNamespace(took=lambda record: None, starts_in=AS_PLANNED)
    made._engines = SimpleNamespace(generation=Generation())
    made._syncs, made._last_sync = 0, None
    for name in ("attest_driver", "attest_trainers", "EngineWatch"):
        monkeypatch.setattr(watched, name, lambda *_, **__: None)
    monkeypatch.setattr(PPOTrainerSync, "on_init_end", lambda self: self.checkpoint_manager.update_weights(0))
    return made


def attest(run_dir: Path, *, scheme: str) -> None:
    write_attestation(
        run_dir,
        Attestation(
            process="rollout-0-0",
            role="rollout",
            rank=0,
            scheme=scheme,
            emulated=False,
            patches=(),
            versions=dict(PINS),
            fingerprint=fingerprint(),
            detail={},
        ),
    )


def acknowledge(run_dir: Path, *, manifest: str) -> None:
    append_sent(run_dir, Sent(sync=1, replica=0, rank=0, manifest="abc", digest_s=0.1))
    taken = {"sync": 1, "replica": 0, "rank": 0, "manifest": manifest, "tensors": 3, "bytes": 12, "layers": 2}
    proven = {"layers_proven": 2, "parameters_proven": 1, "unproven": 0, "waiting_bytes": 4, "telemetry": None}
    append_acknowledgement(run_dir, Acknowledgement(**taken, **proven, digest_s=0.1, proof_s=0.1, seconds=1.0))


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (lambda run_dir: None, "rollout rank 0 did not say what it runs"),
        (lambda run_dir: attest(run_dir, scheme="bf16"), "rollout-0-0 runs bf16, the plan says int8"),
    ],
)
def test_a_missing_or_different_attestation_ends_the_run_before_any_weights_move(
    trainer: WatchedTrainer, said: Callable[[Path], None], problem: str
) -> None:
    said(trainer.run_dir)
    with pytest.raises(AttestationError) as raised:
        trainer.on_init_end()
    assert (raised.value.message, raised.value.exit_code) == (problem, 4)
    assert trainer._syncs == 0


def test_an_update_that_no_engine_proved_ends_the_run(trainer: WatchedTrainer) -> None:
    attest(trainer.run_dir, scheme="int8")
    with pytest.raises(
        SyncError, match="weight update 1: the trainer sent rollout rank 0 of replica 0 nothing"
    ) as raised:
        trainer.on_init_end()
    assert raised.value.exit_code == 4


def test_an_engine_that_took_other_weights_ends_the_run(trainer: WatchedTrainer) -> None:
    attest(trainer.run_dir, scheme="int8")
    acknowledge(trainer.run_dir, manifest="another")
    with pytest.raises(SyncError, match="took the weights another, it was sent abc"):
        trainer.on_init_end()


def test_what_is_as_planned_goes_on_and_each_update_is_asked_for(trainer: WatchedTrainer) -> None:
    attest(trainer.run_dir, scheme="int8")
    acknowledge(trainer.run_dir, manifest="abc")
    trainer.on_init_end()
    assert trainer._syncs == 1 and trainer._last_sync.acknowledgements[0].manifest == "abc"
    with pytest.raises(SyncError, match="weight update 2: "):
        trainer.checkpoint_manager.update_weights(1)

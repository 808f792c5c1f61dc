"""With one precision flow: what trainer and engines say they quantise, at the start and after each change."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from plans import make_plan, with_trainer
from tiny_models import VOCABULARY, tiny
from transformers import PreTrainedModel

from appliance.errors import AttestationError
from appliance.quant import loading
from appliance.record.attestations import Attestation, fingerprint, read_attestations, write_attestation
from appliance.record.plan import RunPlan
from appliance.settings.sections import Forward
from appliance.sync.manifest import Manifest, record_tensor
from appliance.sync.precision import Generation, write_generation
from appliance.terms.schemes import AS_PLANNED, Precision, Scheme
from appliance.terms.settings import Quantisation
from appliance.trainer import attest, rollout_forward
from appliance.trainer.attest import attest_switch, attest_trainers, check_attested
from appliance.trainer.rollout_forward import RolloutForward, backward, follow_engines, put_in, quantised_layers

LAYERS = [
    f"model.layers.{place}.{name}"
    for place in range(2)
    for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    monkeypatch.setattr(rollout_forward, "_PRESENT", [])
    model = tiny("qwen2")
    monkeypatch.setitem(loading._whole, model, len(model.state_dict()))
    return model


def flow_of(model: PreTrainedModel, scheme: Scheme = Scheme.INT8, *, fp8_backward: bool = False) -> RolloutForward:
    told = Quantisation(scheme=scheme, emulated=scheme is not Scheme.INT8)
    return put_in(RolloutForward(model, quantisation=told, num_tokens=VOCABULARY, fp8_backward=fp8_backward))


def one_flow(run_dir: Path) -> RunPlan:
    plan = make_plan(run_dir)
    return with_trainer(plan, forward=Forward.ROLLOUT)


def attested(run_dir: Path, role: str, *, layers: list[str]) -> None:
    said = {"scheme": "int8", "emulated": False, "patches": (), "versions": {}, "fingerprint": fingerprint()}
    write_attestation(
        run_dir, Attestation(process=f"{role}-0", role=role, rank=0, detail={"quantised": layers}, **said)
    )


def said_by_trainer(run_dir: Path) -> list[str]:
    said, _ = read_attestations(run_dir)
    return next(one.detail["quantised"] for one in said if one.role == "trainer")


def test_gradients_in_fp8_are_attested_as_emulated(model: PreTrainedModel) -> None:
    flow_of(model, Scheme.FP8_BLOCK, fp8_backward=True)
    assert (quantised_layers(), backward()) == (LAYERS, "fp8-block, emulated")


def test_trainer_and_engines_are_to_attest_the_same_layers(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attest, "check_attestations", lambda *_, **__: SimpleNamespace(problems=[]))
    flow_of(model)
    assert (quantised_layers(), backward()) == (LAYERS, "bf16")
    attested(tmp_path, "trainer", layers=quantised_layers())
    attested(tmp_path, "rollout", layers=LAYERS[::-1])
    check_attested(one_flow(tmp_path), precision=AS_PLANNED)
    attested(tmp_path, "rollout", layers=LAYERS[1:-1])
    with pytest.raises(AttestationError) as raised:
        check_attested(one_flow(tmp_path), precision=AS_PLANNED)
    assert raised.value.message == (
        "rollout-0 and trainer-0 do not quantise the same: 2 layers differ, first model.layers.0.self_attn.qkv_proj"
    )
    check_attested(make_plan(tmp_path), precision=AS_PLANNED)  # nothing was promised


@pytest.fixture
def workers(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """verl's one worker, as a Ray actor that answers at once."""
    monkeypatch.setattr(attest, "ray", SimpleNamespace(get=lambda answers: answers))
    monkeypatch.setattr(attest, "compute_dtype", lambda _: torch.bfloat16)  # it asks FSDP
    loss = SimpleNamespace(policy_loss=SimpleNamespace(loss_mode="tis"), loss_agg_mode="token-mean")
    optimizer = SimpleNamespace(param_groups=[{"initial_lr": 1e-6}])
    actor = SimpleNamespace(
        engine=SimpleNamespace(module=model, scaler=None, optimizer=optimizer), loss_fn=partial(id, config=loss)
    )
    worker = SimpleNamespace(rank=0, worker_dict={"actor": SimpleNamespace(actor=actor)})
    worker.__ray_call__ = SimpleNamespace(remote=lambda work, *given: work(worker, *given))
    return [worker]


def test_layers_that_an_update_changed_are_attested_by_both_sides(
    model: PreTrainedModel, tmp_path: Path, workers: list[SimpleNamespace]
) -> None:
    """The forward stays as the update left it: what was sent is still to be held against what it computes with."""
    plan, flow, raised_one = one_flow(tmp_path), flow_of(model), Precision(bf16_layers=(LAYERS[3],))
    attest_trainers(plan, workers=workers)
    assert said_by_trainer(tmp_path) == LAYERS
    follow_engines(raised_one)
    flow.note_sent(
        Manifest(sync=1, records=tuple(record_tensor(name, each) for name, each in model.state_dict().items()))
    )
    attested(tmp_path, "rollout", layers=LAYERS[:3] + LAYERS[4:])
    attest_switch(plan, workers=workers)
    assert said_by_trainer(tmp_path) == LAYERS[:3] + LAYERS[4:]
    assert all(layer.sent for layer in flow.linears())
    attested(tmp_path, "rollout", layers=LAYERS)
    with pytest.raises(AttestationError) as raised:
        attest_switch(plan, workers=workers)
    assert raised.value.message == (
        f"rollout-0 and trainer-0 do not quantise the same: 1 layer differs, first {LAYERS[3]}"
    )
    attest_switch(make_plan(tmp_path), workers=[])  # nothing was promised


def test_new_engines_are_followed_before_their_first_update(
    model: PreTrainedModel, tmp_path: Path, workers: list[SimpleNamespace]
) -> None:
    flow_of(model)
    write_generation(tmp_path, Generation(Precision(Scheme.BF16)))
    attest_trainers(one_flow(tmp_path), workers=workers)
    assert said_by_trainer(tmp_path) == []

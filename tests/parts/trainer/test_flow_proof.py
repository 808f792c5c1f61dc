"""With one precision flow: what holds the trainer's forward against the engines, and what is said where they differ."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from plans import make_guard, make_plan, make_rollout
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from appliance.errors import AttestationError, SyncError
from appliance.guard.policy import Action
from appliance.guard.signals import Signals
from appliance.record.attestations import Attestation, fingerprint, write_attestation
from appliance.record.events import parse_event
from appliance.record.plan import RunPlan
from appliance.sync.manifest import Manifest, digest, record
from appliance.sync.precision import AS_PLANNED, Generation, Precision, read_present, write_generation, write_wanted
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation
from appliance.trainer import rollout_forward
from appliance.trainer.attest import check_attested
from appliance.trainer.governor import Governor, signals_of
from appliance.trainer.metrics import Step, StepTelemetry, measure_batch, tell_differing
from appliance.trainer.precision import Live
from appliance.trainer.rollout_forward import RolloutForward, put_in, quantised_layers
from appliance.trainer.sender import DigestingAdapter

BF16 = Precision(Scheme.BF16)
UP = "model.layers.1.mlp.up_proj"
LAYERS = [
    f"model.layers.{place}.{name}"
    for place in range(2)
    for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
]


def one_flow(tmp_path: Path, **changes: object) -> RunPlan:
    plan = make_plan(tmp_path, **changes)
    return plan.replace(trainer=plan.trainer.replace(one_flow=True))


def telemetry(trainer: list[float], *, rollout: list[float]) -> StepTelemetry:
    """Of two sequences, of which the second has padding after its token."""
    return measure_batch(
        torch.tensor(trainer),
        rollout_N=torch.tensor(rollout),
        real_N=torch.tensor([1, 1, 1, 1, 0]),
        responses_N=torch.arange(5),
        row_S=torch.tensor([3, 2]),
        prompts=["a", "a"],
        cap=2.0,
    )


NEXT = float(torch.tensor(-2.0).nextafter(torch.tensor(0.0)))
DIFFERING = telemetry([-1.0, -2.0, -3.0, -0.5, -9.0], rollout=[-1.0, NEXT, -3.0, -0.25, -1.0])
EQUAL = telemetry([-1.0, -2.0, -3.0, -0.5, -9.0], rollout=[-1.0, -2.0, -3.0, -0.5, -1.0])


def test_one_bit_of_a_log_prob_is_a_difference_and_padding_none() -> None:
    assert [each.metrics()["mismatch_equal_fraction"] for each in (EQUAL, DIFFERING)] == [1.0, 0.5]
    nothing = telemetry([-1.0, -2.0, float("nan"), -0.5, 0.0], rollout=[-1.0, -2.0, -3.0, -0.5, 0.0])
    assert nothing.metrics()["mismatch_equal_fraction"] == 0.75


def test_a_difference_is_said_at_once_with_its_place(tmp_path: Path) -> None:
    tell_differing(tmp_path, telemetry=DIFFERING, step=7)
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    event = json.loads(line)
    del event["time"]
    assert event == {
        "kind": "guard",
        "what": "step 7: 2 of 4 log-probs are not the rollouts'",
        "why": "the largest difference is -0.25 nats, at token 0 of sequence 1",
        "step": 7,
        "action": "warn",
    }
    assert parse_event(line) is not None


def test_it_is_the_guards_first_bound_where_it_was_promised(tmp_path: Path) -> None:
    line = {"step": 7, "grad_norm": 1.0, "reward_mean": 0.5, "entropy": 0.25, "response_tokens_mean": 3.0}
    assert signals_of(line, telemetry=DIFFERING, cap=2.0).differing_fraction is None
    assert signals_of(line, telemetry=EQUAL, cap=2.0, is_exact=True).differing_fraction == 0
    signals = signals_of(line, telemetry=DIFFERING, cap=2.0, is_exact=True)
    guard = make_guard(actions=(Action.WARN,), bad_steps=1)
    Governor(make_plan(tmp_path, guard=guard)).after_step(signals)
    first, *_ = [json.loads(text) for text in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert first["what"] == "step 7: observe -> warn: differing_fraction 0.5 above 0 (1 step in a row)"
    assert Signals(7).differing_fraction is None


def test_only_steps_in_the_planned_precision_are_to_be_equal(tmp_path: Path) -> None:
    plan = one_flow(tmp_path, rollout=make_rollout(Scheme.INT8))
    planned = Live("int8", emulated=False)
    raised = Live("int8", emulated=False, bf16_layers=1), Live("bf16", emulated=False)
    assert Step(planned).is_exact(plan)
    assert not any(Step(each).is_exact(plan) for each in raised)
    assert not Step(planned).is_exact(make_plan(tmp_path, rollout=make_rollout(Scheme.INT8)))


# What was sent


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Qwen2ForCausalLM:
    monkeypatch.setattr(rollout_forward, "_PRESENT", [])
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, vocab_size=64, num_hidden_layers=2)).to(torch.bfloat16)


def flow_of(model: Qwen2ForCausalLM) -> RolloutForward:
    return put_in(model, quantisation=Quantisation(scheme=Scheme.INT8), num_tokens=64)


def manifest_of(model: Qwen2ForCausalLM) -> Manifest:
    return Manifest(sync=1, records=tuple(record(name, each) for name, each in model.state_dict().items()))


def log_probs(model: Qwen2ForCausalLM) -> Tensor:
    ids = torch.arange(6)[None]
    with torch.no_grad():
        out = model(input_ids=ids, position_ids=ids, shift_labels=ids, temperature=1.0)
    return out.log_probs


def change(model: Qwen2ForCausalLM) -> Tensor:
    weight = model.get_submodule(UP).weight
    with torch.no_grad():
        weight[3, 5] += 1
    return weight


def test_the_first_forward_after_an_update_computes_with_what_was_sent(model: Qwen2ForCausalLM) -> None:
    flow, manifest = flow_of(model), manifest_of(model)
    model.get_submodule(UP).weight = nn.Parameter(model.get_submodule(UP).weight.detach().clone())
    flow.note_sent(manifest)
    log_probs(model)
    assert model.get_submodule(UP).weight.untyped_storage().resizable()  # as FSDP needs it
    flow.note_sent(manifest)
    weight = change(model)
    with pytest.raises(SyncError) as raised:
        log_probs(model)
    (sent,) = (one.digest for one in manifest.records if one.name == f"{UP}.weight")
    wanted = f"{UP}.weight: the trainer computes with digest {digest(weight)}, the engines got {sent}"
    assert (raised.value.message, raised.value.exit_code) == (wanted, 4)


def test_a_weight_that_was_not_sent_is_named(model: Qwen2ForCausalLM) -> None:
    flow, manifest = flow_of(model), manifest_of(model)
    rest = tuple(one for one in manifest.records if one.name != f"{UP}.weight")
    flow.note_sent(Manifest(sync=1, records=rest))
    with pytest.raises(SyncError) as raised:
        log_probs(model)
    ours = digest(model.get_submodule(UP).weight)
    assert raised.value.message == f"{UP}.weight: the trainer computes with digest {ours}, the engines got none"


def test_weights_of_an_optimizers_step_were_not_sent_yet(model: Qwen2ForCausalLM) -> None:
    flow = flow_of(model)
    flow.note_sent(manifest_of(model))
    before = log_probs(model)
    change(model)
    flow.forget()
    assert not torch.equal(log_probs(model), before)
    flow.note_sent(manifest_of(model))
    change(model)
    flow.forget()  # before any forward
    log_probs(model)


def test_the_sender_tells_the_forward_what_it_sent(
    model: Qwen2ForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the weights stream what the engines will compute in, after them their digests."""
    flow_of(model)
    quantised: list[list[str]] = []

    async def send(self: ServerAdapter, weights: object, **_: object) -> None:
        quantised.append(quantised_layers())
        async for _one in weights:
            pass

    adapter = DigestingAdapter.__new__(DigestingAdapter)
    adapter._syncs, adapter._run_dir, adapter.replica_rank, adapter.rollout_rank = 0, tmp_path, 0, 0
    monkeypatch.setattr(ServerAdapter, "update_weights", send)
    for wanted in (AS_PLANNED, BF16, AS_PLANNED):
        write_wanted(tmp_path, wanted)
        asyncio.run(adapter.update_weights(list(model.state_dict().items())))
        log_probs(model)
    asyncio.run(adapter.update_weights(list(model.state_dict().items())))
    change(model)
    with pytest.raises(SyncError):
        log_probs(model)
    assert quantised == [LAYERS, [], LAYERS, LAYERS]


def test_engines_that_were_started_in_another_precision_are_followed(tmp_path: Path) -> None:
    """Their updates say nothing: what they compute in stands in their generation."""
    assert read_present(tmp_path) == AS_PLANNED
    write_generation(tmp_path, Generation(BF16))
    assert read_present(tmp_path) == BF16
    write_generation(tmp_path, Generation())
    some = Precision(bf16_layers=(UP,))
    write_wanted(tmp_path, some)
    assert read_present(tmp_path) == some


# What is attested


def attested(run_dir: Path, role: str, *, layers: list[str]) -> None:
    said = {"scheme": "int8", "emulated": False, "patches": (), "versions": {}, "fingerprint": fingerprint()}
    write_attestation(
        run_dir, Attestation(process=f"{role}-0", role=role, rank=0, detail={"quantised": layers}, **said)
    )


def test_trainer_and_engines_are_to_attest_the_same_layers(
    model: Qwen2ForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.trainer.attest.check_attestations", lambda *_, **__: SimpleNamespace(problems=[]))
    flow_of(model)
    assert quantised_layers() == LAYERS
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

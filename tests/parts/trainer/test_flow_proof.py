"""With one precision flow: what holds the trainer's forward against the engines, and what is said where they differ."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plans import make_guard, make_plan, make_rollout, with_trainer
from tensordict import NonTensorStack, TensorDict
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.utils import tensordict_utils
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter
from verl.workers.utils.padding import response_from_nested

from appliance.errors import SyncError, TrainingError
from appliance.guard.policy import Action
from appliance.guard.signals import Signals
from appliance.quant.mismatch import DifferingToken, LayerTrace, Place, first_difference
from appliance.record.events import parse_event
from appliance.record.plan import RunPlan
from appliance.settings.sections import Forward
from appliance.sync.manifest import Manifest, digest, record_tensor
from appliance.sync.precision import Generation, read_present, write_generation, write_wanted
from appliance.terms.schemes import AS_PLANNED, Precision, Scheme
from appliance.terms.settings import Quantisation
from appliance.trainer import attest, rollout_forward, rollout_kernels
from appliance.trainer.attest import find_difference, find_differing, first_differing
from appliance.trainer.governor import Governor, signals_of
from appliance.trainer.metrics import StepParts, StepTelemetry, measure_batch, measure_update, tell_differing
from appliance.trainer.precision import Live
from appliance.trainer.rollout_forward import RolloutForward, put_in, quantised_layers
from appliance.trainer.sender import DigestingAdapter
from appliance.trainer.top_words import TOP_IDS, TOP_ROLLOUT, predicting_places
from appliance.trainer.update_log_probs import ForwardLogProbs, SequenceLogProbs, rows_by_key, take_update_log_probs
from appliance.trainer.verl_engine import ApplianceEngine

BF16 = Precision(Scheme.BF16)
UP = "model.layers.1.mlp.up_proj"
LAYERS = [
    f"model.layers.{place}.{name}"
    for place in range(2)
    for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
]


def one_flow(tmp_path: Path, **changes: object) -> RunPlan:
    plan = make_plan(tmp_path, **changes)
    return with_trainer(plan, forward=Forward.ROLLOUT)


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
    told = [each.metrics(is_exact=True)["differing_tokens"] for each in (EQUAL, DIFFERING)]
    assert told == [0, 2] and "differing_tokens" not in DIFFERING.metrics()


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
    line = {"step": 7, "grad_norm": 1.0, "reward_mean": 0.5, "entropy": 0.25, "unfinished_fraction": 0.75}
    assert signals_of(line, telemetry=DIFFERING, cap=2.0).differing_fraction is None
    assert signals_of(line, telemetry=EQUAL, cap=2.0, is_exact=True).differing_fraction == 0
    signals = signals_of(line, telemetry=DIFFERING, cap=2.0, is_exact=True)
    guard = make_guard(actions=(Action.WARN,), bad_steps=1)
    Governor(make_plan(tmp_path, guard=guard)).after_step(signals)
    first, *_ = [json.loads(text) for text in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert first["what"] == "step 7: observe -> warn: differing_fraction 0.5 above 0 (1 step in a row)"
    assert Signals(7).differing_fraction is None


@pytest.mark.parametrize(("scale", "overflow", "counts"), [(512.0, 1.0, False), (0.5, 1.0, True), (512.0, 0.0, True)])
def test_an_overflow_on_the_way_to_a_factor_is_no_bad_gradient(scale: float, overflow: float, counts: bool) -> None:
    line = {"step": 7, "grad_norm": float("inf"), "reward_mean": 0.5, "entropy": 0.25, "unfinished_fraction": 0.75}
    line |= {"grad_scale": scale, "overflow_fraction": overflow}
    assert (signals_of(line, telemetry=EQUAL, cap=2.0).grad_norm is not None) is counts


def test_only_steps_in_the_planned_precision_are_to_be_equal(tmp_path: Path) -> None:
    plan = one_flow(tmp_path, rollout=make_rollout(Scheme.INT8))
    planned = Live("int8", emulated=False)
    raised = Live("int8", emulated=False, bf16_layers=1), Live("bf16", emulated=False)
    assert StepParts(planned).is_exact(plan)
    assert not any(StepParts(each).is_exact(plan) for each in raised)
    assert not StepParts(planned).is_exact(make_plan(tmp_path, rollout=make_rollout(Scheme.INT8)))


# Which layer differs


def traced(model: Qwen2ForCausalLM) -> Callable[..., LayerTrace]:
    """`traced` of a trainer, and of an engine."""

    def ask(ids: list[int], *, names: list[str] | None = None, values_at: Place | None = None) -> LayerTrace:
        trace, ids_1T = LayerTrace(values_at), torch.tensor([ids])
        with torch.no_grad():
            out = model(
                input_ids=ids_1T,
                position_ids=torch.arange(len(ids))[None],
                shift_labels=ids_1T,
                temperature=1.0,
                trace=trace.note,
            )
        assert names in (None, list(trace.digests))
        trace.log_prob = float(out.log_probs[0, -1])
        return trace

    return ask


def test_the_first_token_that_differs_and_what_is_before_it() -> None:
    """One that does not count is none."""
    prompts, responses = torch.tensor([[7, 8], [9, 6]]), torch.tensor([[1, 2, 3], [4, 5, 0]])
    trainer, rollout = torch.tensor([[-1.0, -2.0, -3.0]] * 2), torch.tensor([[-9.0, -2.0, -3.0], [-1.0, NEXT, -9.0]])
    real = torch.tensor([[0, 1, 1], [1, 1, 0]])
    rows = list(zip(prompts, responses, trainer, rollout, real, strict=True))
    assert first_differing(rows) == DifferingToken([9, 6, 4], 5, -2.0, NEXT)


def test_the_engine_that_repeats_its_log_prob_is_held_against_the_trainer(model: Qwen2ForCausalLM) -> None:
    """Of several nobody knows which one sampled."""
    flow_of(model)
    other = copy.deepcopy(model)
    RolloutForward(other, quantisation=Quantisation(scheme=Scheme.INT8), num_tokens=64)
    change(other)
    ids = [5, 9, 33, 2]
    ours, theirs = traced(model)(ids).log_prob, traced(other)(ids).log_prob
    engines = [traced(model), traced(other)]
    finding, why = find_difference(ids, by_trainer=traced(model), by_engines=engines, then=(ours, theirs))
    place, _, gap = finding.rpartition(" ")
    assert place == (
        "model.layers.1.mlp.gate_up_proj is the first layer that differs from the engine's: token 0 of 4, "
        "1 of 512 values by up to"
    )
    assert float(gap) > 0
    assert why == "all before it is equal: its weights or their codes differ, or what it computes"
    finding, why = find_difference(ids, by_trainer=traced(model), by_engines=engines, then=(ours, -9.0))
    assert finding == "no layer differs where both read the sequence of 4 tokens again"
    assert why == f"the engine does not repeat its log-prob: -9 in the batch, {ours:.9g} alone"


def test_with_other_weights_the_engine_that_differs_is_held_against_the_trainer(model: Qwen2ForCausalLM) -> None:
    """What the step's log-probs were says nothing then."""
    flow_of(model)
    other = copy.deepcopy(model)
    RolloutForward(other, quantisation=Quantisation(scheme=Scheme.INT8), num_tokens=64)
    change(other)
    ids = [5, 9, 33, 2]
    finding, why = find_difference(ids, by_trainer=traced(model), by_engines=[traced(model), traced(other)], then=None)
    assert finding.startswith(
        "model.layers.1.mlp.gate_up_proj is the first layer that differs from the engine's: token 0"
    )
    assert why == "all before it is equal: its weights or their codes differ, or what it computes"
    finding, why = find_difference(ids, by_trainer=traced(model), by_engines=[traced(model)], then=None)
    assert finding == "no layer differs where both read the sequence of 4 tokens again"
    assert why == (
        "and both give the next token the same log-prob: the weights before the update or the words drawn from "
        "differed, or how the token was decoded or trained beside others; trainer.old_log_probs: recompute "
        "compares before the weights change"
    )


def called(work: Callable[..., object]) -> SimpleNamespace:
    """As a method of a Ray actor: `ray.get` of what `remote` returns is the value."""
    return SimpleNamespace(remote=work)


@pytest.mark.parametrize("has_moved", [False, True])
def test_the_driver_asks_ranks_and_engines_and_says_what_it_found(
    model: Qwen2ForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_moved: bool
) -> None:
    """Rows as the queue has them, and with weights that have moved as the update held them. The trainer's engine is
    verl's, as it enters and leaves an evaluation."""
    flow_of(model)
    other = copy.deepcopy(model)
    RolloutForward(other, quantisation=Quantisation(scheme=Scheme.INT8), num_tokens=64)
    change(other)
    engine = ApplianceEngine.__new__(ApplianceEngine)
    engine.module, engine._autocast_dtype = other, torch.bfloat16
    engine.engine_config, engine.ulysses_parallel_group = SimpleNamespace(fsdp_size=1, forward_only=False), None
    engine._is_offload_param = engine._is_offload_optimizer = False
    worker = SimpleNamespace(worker_dict={"actor": SimpleNamespace(actor=SimpleNamespace(engine=engine))})
    worker.__ray_call__ = called(lambda of, *args: of(worker, *args))

    def traced_there(ids: list[int], *, token: int, temperature: float, **more: Any) -> LayerTrace:
        assert (token, temperature) == (9, 1.0)
        return traced(model)(ids, **more)

    fields = {
        "prompts": torch.tensor([[1, 2], [3, 4]]),
        "responses": torch.tensor([[5, 6, 7], [8, 9, 10]]),
        "old_log_probs": torch.tensor([[-1.0, -2.0, -3.0]] * 2),
        "rollout_log_probs": torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -2.5, -3.5]]),
        "loss_mask": torch.ones(2, 3, dtype=torch.int64),
    }
    batch = SimpleNamespace(keys=["a_0_0", "a_1_0"], partition_id="train")

    def kv_batch_get(*, keys: list[str], select_fields: list[str], **_: object) -> dict[str, Tensor]:
        places = [batch.keys.index(key) for key in keys]
        return {name: fields[name][places] for name in select_fields}

    monkeypatch.setattr(attest, "transfer_queue", SimpleNamespace(kv_batch_get=kv_batch_get))
    monkeypatch.setattr(attest, "ray", SimpleNamespace(get=lambda answer: answer))
    trained = fields.pop("old_log_probs")[1] if has_moved else None
    rows = (
        {} if trained is None else {"a_1_0": SequenceLogProbs(trained, trained, None)}
    )  # the first update had no other one
    attest.tell_layer(
        find_differing(batch, update_rows=rows or None),
        has_moved=has_moved,
        plan=make_plan(tmp_path),
        step=7,
        workers=[worker] * 2,
        servers=[SimpleNamespace(traced=called(traced_there))],
    )
    event = json.loads((tmp_path / "events.jsonl").read_text())
    named = "step 7: model.layers.1.mlp.gate_up_proj is the first layer that differs from the engine's: token 0 of 3, "
    assert event["what"].startswith(named)
    assert (event["kind"], event["step"], engine.mode) == ("note", 7, None)
    assert event["why"].endswith("; searched with the weights after the step's update") is has_moved
    assert ("the trainer does not repeat its log-prob: -2 in the batch, " in event["why"]) is not has_moved
    assert ("the engine does not repeat its log-prob: -2.5 in the batch, " in event["why"]) is not has_moved


def test_a_trace_knows_values_whatever_their_type_and_shape() -> None:
    with_values, other = LayerTrace(("a", 1)), LayerTrace()
    with_values.note("a", torch.tensor([[1.0, -0.0], [2.0, 3.0]]))
    other.note("a", torch.tensor([[[1.0], [0.0]], [[2.0], [3.5]]], dtype=torch.bfloat16))
    assert with_values.values == [2.0, 3.0]
    assert first_difference(with_values.digests, theirs=other.digests) == ("a", 1)
    assert first_difference(with_values.digests, theirs=with_values.digests) is None


# What was sent


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Qwen2ForCausalLM:
    monkeypatch.setattr(rollout_forward, "_PRESENT", [])
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, vocab_size=64, num_hidden_layers=2)).to(torch.bfloat16)


def flow_of(model: Qwen2ForCausalLM) -> RolloutForward:
    return put_in(RolloutForward(model, quantisation=Quantisation(scheme=Scheme.INT8), num_tokens=64))


def manifest_of(model: Qwen2ForCausalLM) -> Manifest:
    return Manifest(sync=1, records=tuple(record_tensor(name, each) for name, each in model.state_dict().items()))


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


def test_a_step_of_the_optimizer_is_what_the_next_forward_computes_with(
    model: Qwen2ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several updates in a step the codes are each one's own."""
    engine = engine_of(model)
    log_probs(model)
    monkeypatch.setattr(FSDPEngineWithLMHead, "optimizer_step", lambda _: float(change(model).sum()))
    engine.optimizer_step()
    found = log_probs(model)
    flow_of(model)
    assert torch.equal(found, log_probs(model))


def adapter_of(run_dir: Path) -> DigestingAdapter:
    adapter = DigestingAdapter.__new__(DigestingAdapter)
    adapter._syncs, adapter._run_dir, adapter.replica_rank, adapter.rollout_rank = 0, run_dir, 0, 0
    adapter.config = SimpleNamespace(dtype="bfloat16")
    return adapter


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

    adapter = adapter_of(tmp_path)
    monkeypatch.setattr(ServerAdapter, "update_weights", send)
    for precision in (AS_PLANNED, BF16, AS_PLANNED):
        write_wanted(tmp_path, precision)
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


# Without a pass before the update


UPDATE = [("a", 0, [1, 2], [3, 4, 5]), ("a", 1, [1, 2], [6]), ("b", 0, [7], [8, 9])]  # uid, session, prompt, response


def update_of(sequences: list[tuple[str, int, list[int], list[int]]]) -> TensorDict:
    """What a worker has of them."""
    uids, sessions, prompts, responses = zip(*sequences, strict=True)
    whole = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    columns = {"input_ids": whole, "position_ids": [[*range(len(each))] for each in whole], "responses": responses}
    columns["response_mask"] = [[1] * len(each) for each in responses]
    nested = {name: jagged(each, dtype=torch.int64) for name, each in columns.items()}
    names = {"uid": NonTensorStack(*uids), "session_id": NonTensorStack(*sessions)}
    settings = {"use_fused_kernels": True, "use_remove_padding": True, "temperature": 1.0}
    data = TensorDict({**nested, **names}, batch_size=len(sequences))
    tensordict_utils.assign_non_tensor(data, **settings)
    return data


def jagged(rows: Iterable[list[float]], *, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(each, dtype=dtype) for each in rows], layout=torch.jagged)


def engine_of(model: Qwen2ForCausalLM) -> ApplianceEngine:
    engine = ApplianceEngine.__new__(ApplianceEngine)
    engine.module, engine.use_ulysses_sp, engine.pad_to_length = model, False, None
    engine._flow = put_in(
        RolloutForward(model, quantisation=Quantisation(scheme=Scheme.INT8), num_tokens=64, keeps=True)
    )
    engine._flow.note_sent(manifest_of(model))
    return engine


def forward(engine: ApplianceEngine, data: TensorDict) -> Tensor:
    """As verl's forward_step."""
    inputs, arguments = engine.prepare_model_inputs(data)
    output = engine.module(**inputs, use_cache=False)
    found = engine.prepare_model_outputs(output, arguments, data, None)
    return response_from_nested(found["log_probs"], data["response_mask"]).values()


def test_an_updates_log_probs_are_held_by_the_queues_keys_while_the_weights_are_those_sent(
    model: Qwen2ForCausalLM,
) -> None:
    engine, data = engine_of(model), update_of(UPDATE)
    with torch.no_grad():
        sampled = forward(engine, data)
    assert take_update_log_probs() == []  # a pass, and no update
    found = forward(engine, data)
    assert found.requires_grad and torch.equal(found, sampled)
    (held,) = take_update_log_probs()
    assert (held.keys, held.length_S.tolist()) == (["a_0_0", "a_1_0", "b_0_0"], [3, 1, 2])
    assert torch.equal(held.log_probs_N, sampled) and not held.log_probs_N.requires_grad
    assert take_update_log_probs() == []
    forward(engine, data)
    engine._flow.forget()  # the optimizer's step
    forward(engine, data)
    assert len(take_update_log_probs()) == 1
    engine._flow.note_sent(manifest_of(model))
    forward(engine, data)
    engine._flow.note_sent(manifest_of(model))
    assert take_update_log_probs() == []  # of weights before these
    engine._flow.follow(BF16)  # and not yet sent
    forward(engine, data)
    assert take_update_log_probs() == []
    forward(engine_of(model), data)
    engine._flow = flow_of(model)  # which keeps nothing
    engine._flow.note_sent(manifest_of(model))
    forward(engine, data)
    assert take_update_log_probs() == []


def test_after_each_change_of_precision_the_next_update_is_held(
    model: Qwen2ForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what was sampled in the precision that came with the weights, as the governor asked."""

    async def send(self: ServerAdapter, weights: AsyncIterator[object], **_: object) -> None:
        async for _one in weights:
            pass

    engine, data, adapter = engine_of(model), update_of(UPDATE), adapter_of(tmp_path)
    monkeypatch.setattr(ServerAdapter, "update_weights", send)
    sampled_by_update = []
    for precision in (AS_PLANNED, Precision(bf16_layers=(LAYERS[3],)), BF16, AS_PLANNED):
        write_wanted(tmp_path, precision)
        asyncio.run(adapter.update_weights(list(model.state_dict().items())))
        with torch.no_grad():
            sampled = forward(engine, data)
        forward(engine, data)
        engine._flow.forget()
        (update_log_probs,) = take_update_log_probs()
        assert torch.equal(update_log_probs.log_probs_N, sampled)
        sampled_by_update.append(sampled)
    assert torch.equal(sampled_by_update[0], sampled_by_update[3])
    assert not any(torch.equal(sampled_by_update[0], other) for other in sampled_by_update[1:3])


def test_the_entropy_that_is_held_is_a_passs_and_has_no_gradient(model: Qwen2ForCausalLM) -> None:
    engine, data = engine_of(model), update_of(UPDATE[:1])
    inputs, _ = engine.prepare_model_inputs(data)
    with torch.no_grad():
        expected = engine.module(**inputs).entropy
    forward(engine, data)
    (held,) = take_update_log_probs()
    assert torch.equal(held.entropy_N, expected[0, 1:-1]) and not held.entropy_N.requires_grad
    assert engine.module(**inputs).entropy.requires_grad is False
    engine._flow.forget()
    assert engine.module(**inputs).entropy is None  # who does not ask does not pay


def test_whole_distributions_are_held_with_an_updates_log_probs(model: Qwen2ForCausalLM) -> None:
    """Equal to the last bit where the engine's log-probs are this forward's: the words are all of the vocabulary. With
    one log-prob of one word moved by a unit of float32 that token's are not."""
    engine, data = engine_of(model), update_of(UPDATE)
    engine.engine_config = SimpleNamespace(forward_only=False)
    inputs, _ = engine.prepare_model_inputs(data)
    every_TV = torch.arange(64).expand(len(inputs["input_ids"][0]), 64)
    with torch.no_grad():
        plain = forward(engine, data)
        whole_TV = engine.module(**{**inputs, "shift_labels": every_TV[None]}).log_probs[0]
    rollout_NV = whole_TV[predicting_places(data)].clone()
    rollout_NV[4, 7] = torch.nextafter(rollout_NV[4, 7], torch.tensor(0.0))
    lengths = data["response_mask"].offsets().diff().tolist()
    for name, rows in ((TOP_IDS, every_TV[: len(rollout_NV)].int()), (TOP_ROLLOUT, rollout_NV)):
        of_sequences = [each.flatten() for each in rows.split(lengths)]
        data[name] = torch.nested.as_nested_tensor(of_sequences, layout=torch.jagged)
    assert torch.equal(forward(engine, data), plain)
    (held_row,) = take_update_log_probs()
    assert torch.equal(held_row.log_probs_N, plain)
    assert (held_row.divergence_N > 0).tolist() == [False, False, False, False, True, False]
    row = rows_by_key([held_row], keys=held_row.keys, sequences=3)["b_0_0"]
    assert row.divergence.tolist() == held_row.divergence_N[4:].tolist()


KEYS = ["a_1_0", "b_0_0", "a_0_0"]
WHOLE = StepTelemetry(**{**vars(EQUAL), "equal_group_fraction": 0.5, "tokens_mean": 2.0, "seconds": 1.0})


def held_against(
    by_rank: Iterable[ForwardLogProbs], *, sequences: int = 2, of_a: Iterable[float] = (-1.0, -2.0, -3.0)
) -> Any:
    """of_a: log-probs of the rollout `a_0_0`, whose last token does not count."""
    rows = {
        "rollout_log_probs": jagged([[-0.5], [-4.0, -5.0], [*of_a]]),
        "response_mask": jagged([[1], [1, 1], [1, 1, 0]]),
    }
    fetched = TensorDict(rows, batch_size=3)
    return measure_update(WHOLE, keys=KEYS, fetched=fetched, forwards=[*by_rank], sequences=sequences, cap=2.0)


def held_of(**log_probs: list[float]) -> ForwardLogProbs:
    values = [value for each in log_probs.values() for value in each]
    lengths = torch.tensor([len(each) for each in log_probs.values()])
    return ForwardLogProbs(list(log_probs), lengths, torch.tensor(values), torch.arange(float(len(values))))


RANKS = (held_of(a_0_0=[-1.0, -2.0, -9.0]), held_of(b_0_0=[-4.0, -5.0]))  # as the update has them, of two ranks


def test_the_tokens_of_the_first_update_are_held_against_the_rollouts() -> None:
    """A token that does not count may differ; what the whole step says of itself stays."""
    telemetry, entropy = held_against(RANKS)
    assert entropy == (0 + 1 + 0 + 1) / 4
    assert (telemetry.differing_tokens, telemetry.by_length.whole.num_tokens, telemetry.nonfinite_fraction) == (0, 4, 0)
    assert (telemetry.equal_group_fraction, telemetry.tokens_mean, telemetry.mismatch.k3_kl) == (0.5, 2.0, 0.0)
    assert telemetry.seconds > WHOLE.seconds


@pytest.mark.parametrize("token", [0, 1])
def test_a_token_that_differs_is_found_by_its_row_in_the_step(token: int) -> None:
    of_a = torch.tensor([-1.0, -2.0, -3.0])
    of_a[token] = of_a[token].nextafter(torch.tensor(0.0))
    found, _ = held_against(RANKS, of_a=of_a.tolist())
    largest = found.by_length.whole.largest
    assert (found.differing_tokens, found.differing_fraction) == (1, 0.25)
    assert (largest.sequence, largest.position) == (2, token)  # of KEYS


def test_a_log_prob_of_the_update_that_is_no_number_is_counted() -> None:
    held = (held_of(a_0_0=[-1.0, float("nan"), 0.0]), held_of(b_0_0=[-4.0, -5.0]))
    found, _ = held_against(held)
    assert (found.nonfinite_fraction, found.differing_fraction) == (0.25, 0.25)


@pytest.mark.parametrize(
    ("held", "sequences", "message"),
    [
        ((), 2, "0 sequences of this step's first update were collected for its metrics, of 2"),
        (RANKS, 3, "2 sequences of this step's first update were collected for its metrics, of 3"),
        (
            (*RANKS, held_of(c_0_0=[-1.0])),
            2,
            "3 sequences of this step's first update were collected for its metrics, of 2",
        ),
        (
            (*RANKS[:1], held_of(c_0_0=[-1.0])),
            2,
            "2 sequences of this step's first update were collected for its metrics, of 2",
        ),
        ((held_of(a_0_0=[-1.0]),), 1, "log-probs of this step's first update have not the rollouts' lengths"),
    ],
)
def test_a_step_without_its_proof_ends_the_run(held: tuple[ForwardLogProbs, ...], sequences: int, message: str) -> None:
    with pytest.raises(TrainingError) as raised:
        held_against(held, sequences=sequences)
    assert raised.value.message == message


def test_a_forward_that_differs_in_the_update_is_noticed(
    model: Qwen2ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one rounding in one norm, in the update only."""
    engine, data = engine_of(model), update_of(UPDATE)
    with torch.no_grad():
        sampled = forward(engine, data)
    rows = {"rollout_log_probs": sampled, "response_mask": torch.ones(6)}
    offsets = data["response_mask"].offsets()
    fetched = TensorDict(
        {name: torch.nested.nested_tensor_from_jagged(each, offsets) for name, each in rows.items()}, 3
    )
    keys = ["a_0_0", "a_1_0", "b_0_0"]

    def noticed() -> float:
        forward(engine, data)
        telemetry, _ = measure_update(
            WHOLE, keys=keys, fetched=fetched, forwards=take_update_log_probs(), sequences=3, cap=2.0
        )
        return telemetry.differing_fraction

    assert noticed() == 0
    norm, calls = rollout_kernels.plain_norm, []

    def other(summed: Tensor, weight_H: Tensor, *, eps: float) -> Tensor:
        calls.append(1)
        return norm(summed, weight_H, eps=eps) * (1 + 2**-7 * (len(calls) == 1))

    monkeypatch.setattr(rollout_kernels, "plain_norm", other)
    assert noticed() > 0.5

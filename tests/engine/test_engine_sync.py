"""A weight update in a real vLLM engine: the same weights change nothing, other weights are those of a fresh engine."""

from __future__ import annotations

import pytest
from engines import PROMPTS, Engine, read_checkpoint, start_engine
from faults import recover

from appliance.engine.update import WeightState

pytestmark = pytest.mark.engine


def test_reloading_the_same_weights_is_identical(engine: Engine, checkpoints) -> None:
    tensors = read_checkpoint(checkpoints[0])
    engine.load(tensors)
    before = engine.generate()
    for bucket in (1000, 3, 1):
        engine.load(tensors, bucket=bucket)
        assert engine.generate() == before
    engine.load(tensors[::-1], bucket=2)
    assert engine.generate() == before


def test_other_weights_equal_a_fresh_engine(engine: Engine, checkpoints) -> None:
    engine.load(read_checkpoint(checkpoints[0]))
    first = engine.generate()
    report = engine.load(read_checkpoint(checkpoints[1]), bucket=5)
    second = engine.generate()
    fresh = start_engine(checkpoints[1], scheme=engine.scheme).generate()
    assert second == fresh
    assert second != first
    assert report.tensors == len(read_checkpoint(checkpoints[1]))
    engine.load(read_checkpoint(checkpoints[0]))
    assert engine.generate() == first
    assert len(first) == len(PROMPTS)


def test_bf16_layers_are_proven_by_their_columns_as_on_a_gpu(checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this CPU's kernels."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from appliance.engine import kernel_proof
    from appliance.errors import SyncError

    engine = start_engine(checkpoints[0], scheme="bf16")
    monkeypatch.setattr(kernel_proof, "rounds_once", lambda: False)
    for sent in (checkpoints[1], checkpoints[0]):
        taken = engine.load(read_checkpoint(sent))
        assert taken.layers_proven == taken.layers > 0
    right = UnquantizedLinearMethod.apply
    monkeypatch.setattr(UnquantizedLinearMethod, "apply", lambda *given: 1.01 * right(*given))
    with pytest.raises(SyncError, match="qkv_proj on rank 0 is not as received: probe, output channel"):
        engine.load(read_checkpoint(checkpoints[1]))


def test_one_layer_waits_in_the_trainers_order_and_what_disorder_costs_is_reported(engine: Engine, checkpoints) -> None:
    """The largest layer of two tensors is `gate_up_proj`. By parts, all three gates come first."""
    tensors = read_checkpoint(checkpoints[0])
    gate = next(tensor.nbytes for name, tensor in tensors if name.endswith("gate_proj.weight"))
    assert 0 < engine.load(tensors, bucket=1).waiting_bytes <= 2 * gate
    by_parts = sorted(tensors, key=lambda each: each[0].split(".")[3:])
    assert engine.load(by_parts, bucket=1).waiting_bytes >= 3 * gate


def test_a_missing_tensor_is_named_and_final(engine: Engine, checkpoints) -> None:
    from appliance.errors import SyncError

    tensors = read_checkpoint(checkpoints[0])
    without = [(name, t) for name, t in tensors if name != "model.layers.1.mlp.up_proj.weight"]
    update = engine.update()
    update.begin()
    update.load(without)
    with pytest.raises(SyncError) as raised:
        update.finish()
    fault = "1 layer did not receive all its weights: model.layers.1.mlp.gate_up_proj (45056 of 90112 elements)"
    assert raised.value.message == f"weight update: {fault}"
    with pytest.raises(SyncError) as raised:
        update.begin()
    assert raised.value.message == f"weight update: the engine's weights are half-updated: {fault}"
    update.load([(name, t) for name, t in tensors if name == "model.layers.1.mlp.up_proj.weight"])
    update.finish()


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_value_that_is_not_finite_is_refused_by_its_tensors_name(engine: Engine, checkpoints, value: str) -> None:
    """In each tensor, as it comes; or by what a BF16 kernel answers, of columns that it is not asked for, too."""
    from appliance.errors import SyncError

    tensors = read_checkpoint(checkpoints[0])
    for name, tensor in tensors:
        bad = tensor.clone()
        bad.view(-1)[-1] = float(value)
        with pytest.raises(SyncError) as raised:
            engine.load([(each, bad if each == name else held) for each, held in tensors], bucket=1)
        assert raised.value.message == f"weight update: {name} has a value that is not finite"
        recover(engine, tensors)


def test_a_tensor_of_a_layer_that_is_not_asked_is_looked_at_for_values_that_are_not_finite(
    engine: Engine, checkpoints
) -> None:
    from appliance.errors import SyncError

    tensors = read_checkpoint(checkpoints[0])
    update = engine.update(prove_every=1000)
    update.begin()
    update.load(tensors)
    update.finish()  # the first update asks all
    update.begin()
    bad = tensors[4][1].clone().fill_(float("nan"))
    with pytest.raises(SyncError) as raised:
        update.load([(tensors[4][0], bad)])
    assert raised.value.message == f"weight update: {tensors[4][0]} has a value that is not finite"
    recover(engine, tensors)


def test_a_tensor_that_comes_twice_is_refused(engine: Engine, checkpoints) -> None:
    """vLLM counts elements: one half of a fused layer twice would pass for both halves, the other being garbage."""
    from appliance.errors import SyncError

    tensors = dict(read_checkpoint(checkpoints[0]))
    name = "model.layers.1.mlp.gate_proj.weight"
    update = engine.update()
    update.begin()
    update.load([(name, tensors.pop(name))])
    with pytest.raises(SyncError) as raised:
        update.load([(name, tensors["model.layers.1.mlp.up_proj.weight"])])
    assert raised.value.message == f"weight update: {name} came twice"
    assert (update.state, update.fault) == (WeightState.BROKEN, f"{name} came twice")
    update.load(list(tensors.items()))
    update.finish()

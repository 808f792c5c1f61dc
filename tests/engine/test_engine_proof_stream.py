"""What a stream may not bring, although its digests are right: each is a SyncError that names the tensor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from faults import BIAS, EMBEDDING, NORM, WEIGHT, Bench, new_update, recover, sent, start_bench, take

from appliance.engine.kernel_proof import choose_request
from appliance.engine.proof import _same_bits
from appliance.engine.update import WeightState
from appliance.errors import EngineError, NumericsError, SyncError
from appliance.quant.profile import Smoothing, SmoothingGroup

pytestmark = pytest.mark.engine

WIDTH = 128
QKV = tuple(f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")


@pytest.fixture(scope="module")
def int8(checkpoints: tuple[Path, Path]) -> Iterator[Bench]:
    yield from start_bench(checkpoints, scheme="int8")


def refused(bench: Bench, stream: list, **settings: object) -> SyncError:
    """Take an update that fails. The engine takes no other one, for the same reason."""
    update = new_update(bench.engine, **settings)
    with pytest.raises(SyncError) as raised:
        take(bench.engine, stream, update=update)
    assert update.state is WeightState.BROKEN
    assert update.fault == raised.value.message.removeprefix("weight update: ")
    recover(bench.engine, bench.old)
    return raised.value


def test_another_head_than_the_embedding_it_is_tied_to(int8: Bench) -> None:
    """vLLM drops it unread: a trainer whose head moved would never show."""
    embedding = dict(int8.new)[EMBEDDING]
    take(int8.engine, sent([*int8.new, ("lm_head.weight", embedding)]))
    recover(int8.engine, int8.old)
    error = refused(int8, sent([*int8.new, ("lm_head.weight", embedding * 2)]))
    said = f"weight update 1: this model's head is tied, and lm_head.weight is not {EMBEDDING}: digests "
    assert error.message.startswith(said)


def test_a_value_that_smoothing_takes_out_of_the_format(int8: Bench) -> None:
    """A NumericsError of the codec or of smoothing has another exit code: a sync has one way to end."""
    group = SmoothingGroup("model.layers.0.input_layernorm.weight", QKV, torch.full((WIDTH,), 4096.0))
    bad = [(name, torch.full_like(value, 3e38) if name == QKV[1] else value) for name, value in int8.new]
    error = refused(int8, sent(bad), smoothing=Smoothing((group,)))
    assert error.message.startswith(f"weight update: {QKV[1]}: a value times its smoothing scale does not fit")
    assert isinstance(error.__cause__, NumericsError) and error.exit_code == 4


def test_a_quantiser_that_fails_is_a_failed_update(int8: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what vLLM does with a complete layer; the error names the tensor that completed it."""
    from appliance.engine import int8 as methods

    original, failed = methods.quantise_for_kernel, []

    def refuse_once(*args: object, **kwargs: object) -> object:
        if failed:
            return original(*args, **kwargs)
        failed.append(True)
        raise NumericsError("a weight to quantise has a value that is not finite")

    monkeypatch.setattr(methods, "quantise_for_kernel", refuse_once)
    error = refused(int8, sent(int8.new))
    assert error.message.startswith("weight update: model.layers.0.")
    assert error.message.endswith(".weight: a weight to quantise has a value that is not finite")


def test_a_bias_that_is_too_long(int8: Bench) -> None:
    """vLLM's loader takes the first part of it."""
    bias = dict(int8.new)[BIAS]
    bad = [(name, torch.cat([value, value]) if name == BIAS else value) for name, value in int8.new]
    error = refused(int8, sent(bad))
    shape = [2 * len(bias)]
    said = f"weight update: {BIAS} of shape {shape} is not as large as the model's"
    assert error.message == said or error.message.startswith(f"weight update: vLLM refused {BIAS} of shape {shape}")


@pytest.mark.parametrize(
    ("missing", "changes"),
    [
        ("model.layers.9.input_layernorm.weight", {"source": "model.layers.9.input_layernorm.weight"}),
        ("model.layers.0.self_attn.g_proj.weight", {"linears": (*QKV, "model.layers.0.self_attn.g_proj.weight")}),
    ],
)
def test_smoothing_of_another_model(missing: str, changes: dict, int8: Bench) -> None:
    """Layers that were multiplied and a norm that was not divided would be another function."""
    wanted = {"source": "model.layers.0.input_layernorm.weight", "linears": QKV}
    group = SmoothingGroup(**(wanted | changes), scale_K=torch.full((WIDTH,), 2.0))
    error = refused(int8, sent(int8.new), smoothing=Smoothing((group,)))
    assert error.message == f"weight update 1: the profile smooths {missing}, which this model does not have"
    assert "of another model" in error.hint


def test_a_method_of_vllms_that_cannot_be_asked_is_unproven(int8: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weight lies as codes in a layout of vLLM's: only the digest is checked, and the count says so."""
    layer = int8.engine.model.get_submodule("model.layers.1.mlp.gate_up_proj")
    monkeypatch.setattr(layer.quant_method, "provable", False)
    report = take(int8.engine, sent(int8.new))
    recover(int8.engine, int8.old)
    assert (report.layers, report.layers_proven, report.unproven) == (12, 12, 2)


def test_the_layers_of_an_update_are_those_whose_turn_it_is(int8: Bench) -> None:
    update = new_update(int8.engine, prove_every=2)
    for number in range(1, 18):
        proven_layers: set[str] = set()
        proven = take(int8.engine, sent(int8.new, number=number), update=update, proven_layers=proven_layers)
        turns = {name: turn for turn, name in enumerate(update._proof._layers)}
        due = {name for name in update._proof._provable if choose_request(turns[name], sync=number, every=2)}
        assert proven_layers == due and proven.layers_proven == len(due)
        assert not (update._proof._kernels or update._proof._expected), "they are kept until the next update"
        assert (len(due) == 13) == (number in (1, 16))
    recover(int8.engine, int8.old)


def test_small_tensors_are_the_same_when_their_bits_are() -> None:
    zero, nan = torch.zeros(3), torch.full((3,), torch.nan)
    assert _same_bits(zero, zero.clone()) and _same_bits(nan, nan.clone())
    for other in (-zero, zero[:2], zero.view(3, 1), zero.bfloat16(), zero.int(), zero.to("meta")):
        assert not _same_bits(zero, other)


def test_an_entry_of_ignore_that_keeps_nothing(int8: Bench) -> None:
    """A name that is misspelt would quantise what was to be kept."""
    from appliance.engine.config import ApplianceConfig, require_ignored_layers
    from appliance.terms.schemes import Scheme
    from appliance.terms.settings import Quantisation

    good = ("model.layers.0.mlp.gate_proj", "model.layers.1.mlp.gate_up_proj", "re:.*o_proj$", "re:.*q_proj", "lm_head")
    require_ignored_layers(int8.engine.model, ApplianceConfig(Quantisation(scheme=Scheme.INT8, ignore=good)))
    for bad in ("model.layers.7.mlp.gate_proj", "re:.*o_prj$", "o_proj"):
        config = ApplianceConfig(Quantisation(scheme=Scheme.INT8, ignore=(*good, bad)))
        with pytest.raises(EngineError) as raised:
            require_ignored_layers(int8.engine.model, config)
        assert raised.value.message == f"ignore: `{bad}` is no layer of this model"


def test_the_worker_refuses_an_entry_of_ignore_that_keeps_nothing(checkpoints: tuple[Path, Path]) -> None:
    with pytest.raises(EngineError, match="ignore: `o_proj` is no layer of this model"):
        for bench in start_bench(checkpoints, scheme="int8", ignore=("o_proj",)):
            bench.engine.llm.collective_rpc("monkey_patch_model", args=(512,))


def test_constants_are_of_the_model(int8: Bench) -> None:
    assert {NORM, WEIGHT, EMBEDDING, BIAS, *QKV} <= {name for name, _ in int8.new}

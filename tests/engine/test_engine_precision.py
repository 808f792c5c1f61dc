"""An engine that changes its precision with a weight update, and back: the same numbers as one that was built so."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engines import Engine, free_engine, read_checkpoint, start_engine
from faults import Tensors, flip_bit, given_to_vllm, new_update, recover

from appliance.errors import SyncError
from appliance.terms.schemes import AS_PLANNED, Precision, Scheme
from appliance.terms.settings import Quantisation

pytestmark = pytest.mark.engine

BF16 = Precision(Scheme.BF16)
WORST = "model.layers.1.mlp.down_proj"
PARTS = tuple(f"model.layers.0.self_attn.{part}_proj" for part in "qkv")
Answers = list[tuple[list[int], list[float]]]


def sent(tensors: Tensors, *, precision: Precision, number: int) -> Tensors:
    from appliance.trainer.sender import DigestedWeights

    async def collect() -> Tensors:
        return [pair async for pair in DigestedWeights(tensors, sync=number, precision=precision)]

    return asyncio.run(collect())


class Switched:
    """An engine and its one WeightUpdate, as a worker has it. Each update counts on."""

    def __init__(self, engine: Engine, **settings: object) -> None:
        self.engine = engine
        self._settings = settings
        self.begin_anew()

    def begin_anew(self, *, number: int = 0) -> None:
        self._update = new_update(self.engine, **self._settings)
        self._number = number

    def to(self, precision: Precision, tensors: Tensors, *, stream: Tensors | None = None) -> object:
        from vllm.config import set_current_vllm_config

        self._number += 1
        stream = stream or sent(tensors, precision=precision, number=self._number)
        with set_current_vllm_config(self.engine.runner.vllm_config), torch.no_grad():
            self._update.begin()
            self._update.load([(name, tensor.clone()) for name, tensor in stream])
            return self._update.finish()

    def methods(self) -> list[str]:
        linear = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
        layers = self.engine.model.named_modules()
        return [type(layer.quant_method).__name__ for name, layer in layers if name.endswith(linear)]

    def scheme(self) -> tuple[str, bool]:
        from appliance.engine.attest import live_scheme

        live = live_scheme(self.engine.model)
        return str(live.scheme), live.emulated


@pytest.fixture(scope="module")
def old(checkpoints: tuple[Path, Path]) -> Tensors:
    return read_checkpoint(checkpoints[0])


@pytest.fixture(scope="module")
def new(checkpoints: tuple[Path, Path]) -> Tensors:
    return read_checkpoint(checkpoints[1])


def fresh(checkpoint: Path, **settings: object) -> Answers:
    engine = start_engine(checkpoint, **settings)
    answers = engine.generate()
    free_engine(engine)
    return answers


@pytest.fixture(scope="module")
def built(checkpoints: tuple[Path, Path]) -> dict[str, Answers]:
    """What engines answer that were started with the second checkpoint's weights."""
    return {
        "bf16": fresh(checkpoints[1], scheme="bf16"),
        "int8": fresh(checkpoints[1], scheme="int8"),
        "raised": fresh(checkpoints[1], scheme="int8", ignore=(WORST, *PARTS)),
    }


@pytest.fixture(scope="module")
def int8(checkpoints: tuple[Path, Path]) -> Iterator[Switched]:
    engine = start_engine(checkpoints[0], scheme="int8")
    yield Switched(engine)
    free_engine(engine)


def test_bf16_and_back_answer_as_engines_that_were_built_so(
    int8: Switched, old: Tensors, new: Tensors, built: dict[str, Answers]
) -> None:
    """Tokens and log-probs, bit for bit; every layer is proven whenever one changed."""
    from appliance.engine.precision import raised_layers

    int8.begin_anew()
    assert built["bf16"] != built["int8"] != built["raised"]
    report = int8.to(BF16, new)
    assert (report.switched, report.layers, report.layers_proven) == (12, 13, 13)
    assert (int8.scheme(), set(int8.methods()), report.telemetry) == (
        ("bf16", False),
        {"RaisedLinearMethod"},
        None,
    )
    assert int8.engine.generate() == built["bf16"]
    assert raised_layers(int8.engine.model, planned=Quantisation(scheme=Scheme.INT8)) == 12
    again = int8.to(BF16, new)
    assert (again.switched, int8.engine.generate()) == (0, built["bf16"])
    back = int8.to(AS_PLANNED, new)
    assert (back.switched, back.layers_proven, int8.scheme()) == (12, 13, ("int8", False))
    assert back.telemetry.codes_changed_fraction is None  # nothing to compare with
    assert int8.engine.generate() == built["int8"]
    assert raised_layers(int8.engine.model, planned=Quantisation(scheme=Scheme.INT8)) == 0
    assert int8.to(AS_PLANNED, old).telemetry.codes_changed_fraction > 0.5


def test_some_layers_in_bf16_are_as_ignored_ones(int8: Switched, new: Tensors, built: dict[str, Answers]) -> None:
    """Named as a checkpoint names the parts, or by the fused layer's own name."""
    int8.begin_anew()
    report = int8.to(Precision(bf16_layers=(WORST, *PARTS)), new)
    assert (report.switched, int8.methods().count("RaisedLinearMethod"), int8.scheme()) == (2, 2, ("int8", False))
    assert int8.engine.generate() == built["raised"]
    fused = Precision(bf16_layers=(WORST, "model.layers.0.self_attn.qkv_proj"))
    assert (int8.to(fused, new).switched, int8.engine.generate()) == (0, built["raised"])
    assert int8.to(AS_PLANNED, new).switched == 2
    assert int8.engine.generate() == built["int8"]


@pytest.mark.parametrize(
    ("precision", "like", "raised"), [(BF16, "bf16", 12), (Precision(bf16_layers=(WORST, *PARTS)), "raised", 2)]
)
def test_an_engine_that_is_started_in_a_precision_answers_as_one_that_changed(
    checkpoints: tuple[Path, Path],
    new: Tensors,
    built: dict[str, Answers],
    precision: Precision,
    like: str,
    raised: int,
) -> None:
    """The way of a restart: old weights, then the run's fifth update, of which everything is proven."""
    from appliance.engine.precision import raised_layers
    from appliance.sync.precision import quantisation_at

    planned = Quantisation(scheme=Scheme.INT8)
    started_with = quantisation_at(planned, precision)
    engine = start_engine(checkpoints[0], scheme=str(started_with.scheme), ignore=started_with.ignore)
    restarted = Switched(engine, taken_before=4, prove_every=8)
    restarted.begin_anew(number=4)
    report = restarted.to(AS_PLANNED, new)
    assert (report.sync, report.switched, report.layers, report.layers_proven) == (5, 0, 13, 13)
    assert engine.generate() == built[like]
    assert raised_layers(engine.model, planned=planned) == raised
    assert raised_layers(engine.model, planned=started_with) == 0
    later = restarted.to(AS_PLANNED, new)
    assert 0 < later.layers_proven < 13
    with pytest.raises(SyncError, match="the trainer sent number 9, this worker has taken 6 before"):
        restarted.to(AS_PLANNED, new, stream=sent(new, precision=AS_PLANNED, number=9))
    free_engine(engine)


def test_experts_are_kept_raised_and_ranked_by_one_name(tmp_path: Path) -> None:
    """Layer 0 is dense. Experts of layer 1 are kept by the plan, those of layer 2 are raised by new engines."""
    from families import make_family

    from appliance.engine.config import ApplianceConfig, require_ignored_layers
    from appliance.engine.precision import raised_layers
    from appliance.sync.precision import quantisation_at

    kept, experts = (f"model.layers.{number}.mlp.experts" for number in (1, 2))
    folder = make_family(tmp_path / "model", name="qwen3-moe", seed=1)
    planned = Quantisation(scheme=Scheme.INT8, ignore=(kept,))
    for precision, raised in ((AS_PLANNED, 0), (Precision(bf16_layers=(experts,)), 1), (BF16, 9)):  # 6 + 2 + 1
        started_with = quantisation_at(planned, precision)
        started = Switched(start_engine(folder, scheme=str(started_with.scheme), ignore=started_with.ignore))
        model = started.engine.model
        require_ignored_layers(model, ApplianceConfig(started_with))
        started.to(AS_PLANNED, read_checkpoint(folder))
        assert raised_layers(model, planned=planned) == raised
        errors = started._update.telemetry.layer_errors
        assert (experts in errors) is (precision == AS_PLANNED)
        assert {name.rpartition(".")[2] for name in errors} <= {
            *("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "experts")
        }
        free_engine(started.engine)


def test_an_engine_that_keeps_its_experts_changes_as_one_without(tmp_path: Path) -> None:
    """As the plan says where `ignore` names all experts: to BF16 and back with weight updates, as engines built so."""
    from families import make_family

    ignore = (r"re:.*\.experts$",)
    folders = [make_family(tmp_path / str(seed), name="qwen3-moe", seed=seed) for seed in (1, 2)]
    new = read_checkpoint(folders[1])
    answer, bf16 = fresh(folders[1], scheme="int8", ignore=ignore), fresh(folders[1], scheme="bf16")
    assert answer != bf16
    moe = Switched(start_engine(folders[0], scheme="int8", ignore=ignore))
    report = moe.to(BF16, new)
    assert (report.switched, moe.scheme(), moe.engine.generate()) == (8, ("bf16", False), bf16)  # 6 + 2 dense
    report = moe.to(AS_PLANNED, new)
    assert (report.switched, moe.scheme(), moe.engine.generate()) == (8, ("int8", False), answer)
    free_engine(moe.engine)


@pytest.mark.parametrize("precision", [BF16, AS_PLANNED, Precision(bf16_layers=(WORST,))])
def test_a_bit_flipped_after_a_change_is_caught(
    int8: Switched, old: Tensors, new: Tensors, precision: Precision
) -> None:
    """On the way, and in what a kernel multiplies by: another tensor than the one received."""
    before = AS_PLANNED if precision != AS_PLANNED else BF16
    # In update 2 the proof of a BF16 layer looks at columns 128 to 191 of 352, and 0 to 63 of 128.
    for name, column in ((f"{WORST}.weight", 150), ("model.layers.2.self_attn.q_proj.weight", 10)):
        int8.begin_anew()
        int8.to(before, old)
        stream = sent(new, precision=precision, number=2)
        damaged = [(one, flip_bit(tensor, at=0.5, bit=0) if one == name else tensor) for one, tensor in stream]
        with pytest.raises(SyncError, match=f"{name} arrived with digest"):
            int8.to(precision, new, stream=damaged)
        recover(int8.engine, old)
        int8.begin_anew()
        int8.to(before, old)
        at = column / (dict(new)[name].numel() - 1)
        twice = given_to_vllm(name, lambda tensor, at=at: flip_bit(tensor, at=at, bit=7))  # a factor of 2
        with twice, pytest.raises(SyncError, match="on rank 0 is not as received"):
            int8.to(precision, new)
        recover(int8.engine, old)


@pytest.mark.parametrize(
    ("precision", "says"),
    [
        (
            Precision(bf16_layers=("model.layers.9.mlp.down_proj",)),
            "weight update: `model.layers.9.mlp.down_proj` is to be in BF16 and is no quantised layer of this engine",
        ),
        (
            Precision(bf16_layers=PARTS[:2]),
            "weight update: only a part of model.layers.0.self_attn.qkv_proj is to be in BF16",
        ),
        (
            Precision(Scheme.FP8_BLOCK),
            "weight update: model.layers.0.self_attn.qkv_proj is int8 and cannot become fp8-block while the engine "
            "runs",
        ),
    ],
)
def test_a_precision_that_this_engine_cannot_have_is_refused(
    int8: Switched, old: Tensors, precision: Precision, says: str
) -> None:
    int8.begin_anew()
    with pytest.raises(SyncError) as raised:
        int8.to(precision, old)
    assert raised.value.message == says
    assert set(int8.methods()) == {"Int8LinearMethod"}
    recover(int8.engine, old)


def test_the_precision_is_one_of_the_tensors_that_are_digested(int8: Switched, old: Tensors) -> None:
    """Another one than was sent, one that comes late, and one that cannot be read."""
    stream = sent(old, precision=BF16, number=1)
    first, rest = stream[0], stream[1:]
    other = sent(old, precision=Precision(bf16_layers=(WORST,)), number=1)[0]
    broken = (first[0], first[1][3:])
    for damaged, says in (
        ([other, *rest], "appliance.precision arrived with digest"),
        ([rest[0], first, *rest[1:]], "the precision came after the first tensor"),
        ([broken, *rest], "the requested precision cannot be read"),
        (rest, "appliance.precision was sent and did not arrive"),
    ):
        int8.begin_anew()
        with pytest.raises(SyncError, match=says):
            int8.to(BF16, old, stream=damaged)
        recover(int8.engine, old)


def test_an_emulated_scheme_becomes_a_finer_one_and_back(checkpoints: tuple[Path, Path], new: Tensors) -> None:
    blocks = fresh(checkpoints[1], scheme="fp8-block", emulated=True)
    plain = fresh(checkpoints[1], scheme="bf16")
    switched = Switched(start_engine(checkpoints[0], scheme="fp8", emulated=True))
    planned_answer = switched.to(AS_PLANNED, new) and switched.engine.generate()
    finer = switched.to(Precision(Scheme.FP8_BLOCK), new)
    assert (finer.switched, finer.layers_proven) == (12, 13)
    assert (switched.scheme(), switched.engine.generate()) == (("fp8-block", True), blocks)
    assert switched.to(BF16, new).switched == 12
    assert (switched.scheme(), switched.engine.generate()) == (("bf16", False), plain)
    switched.to(AS_PLANNED, new)
    assert (switched.scheme(), switched.engine.generate()) == (("fp8", True), planned_answer)
    free_engine(switched.engine)


def test_a_plain_bf16_engine_has_nothing_to_change(checkpoints: tuple[Path, Path], new: Tensors) -> None:
    switched = Switched(start_engine(checkpoints[0], scheme="bf16"))
    assert switched.to(BF16, new).switched == 0
    assert switched.to(Precision(bf16_layers=(WORST,)), new).switched == 0
    free_engine(switched.engine)

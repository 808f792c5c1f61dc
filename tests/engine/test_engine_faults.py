"""What goes wrong with a weight update is caught: every fault, at several places, and none slips through.

The numbers that are asserted here are those of the table in docs/weights.md.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from faults import (
    EMBEDDING,
    NORM,
    PLACES,
    WEIGHT,
    Bench,
    Tally,
    Tensors,
    flip_bit,
    given_to_vllm,
    new_update,
    recover,
    sent,
    settle,
    spread,
    start_bench,
    take,
    transfer,
)
from smoothings import random_smoothing
from torch import Tensor

from appliance.errors import SyncError
from appliance.quant.profile import Smoothing, fold
from appliance.sync.manifest import MANIFEST_NAME
from appliance.sync.records import Telemetry

pytestmark = pytest.mark.engine

BUCKET_BYTES = 300_000
NOT_FINITE = "has a value that is not finite"
_LIST = "the list of what was sent (cannot be read|is missing)"  # it lies at the end of the last bucket
TRANSPORT = {
    "bit in a bucket": f"arrived with digest|{NOT_FINITE}|{_LIST}|was sent with|did not arrive",
    "end of a bucket overwritten": f"arrived with digest|{_LIST}",
    "bucket truncated": f"was sent and did not arrive|{_LIST}",
}


@pytest.fixture(scope="module")
def int8(checkpoints: tuple[Path, Path]) -> Iterator[Bench]:
    yield from start_bench(checkpoints, scheme="int8")


@pytest.fixture(scope="module")
def bf16(checkpoints: tuple[Path, Path]) -> Iterator[Bench]:
    yield from start_bench(checkpoints, scheme="bf16")


def replaced(stream: Tensors, name: str, tensor: Tensor) -> Tensors:
    return [(one, tensor if one == name else value) for one, value in stream]


# nothing wrong


@pytest.mark.parametrize("scheme", ["int8", "bf16"])
def test_an_update_without_a_fault_is_proven(scheme: str, request: pytest.FixtureRequest) -> None:
    """Many updates with other weights, other probes: a proof that cries wolf is of no use."""
    bench: Bench = request.getfixturevalue(scheme)
    update = new_update(bench.engine)
    for number in range(1, 21):
        state = bench.new if number % 2 else bench.old
        report = take(bench.engine, sent(state, number=number), update=update)
        assert report.sync == number
        assert report.tensors == len(state) == 38
        assert (report.layers, report.layers_proven, report.unproven) == (13, 13, 0)
        assert report.parameters_proven == 17  # norms, biases, embedding
    assert len(report.manifest) == 32
    recover(bench.engine, bench.old)


def test_a_rotating_sample_proves_every_layer_in_turn(int8: Bench) -> None:
    """All at the first update, and each layer in any three."""
    update = new_update(int8.engine, prove_every=3)
    proven: list[set[str]] = []
    for number in range(1, 8):
        proven.append(set())
        take(int8.engine, sent(int8.new, number=number), update=update, proven_layers=proven[-1])
    every = proven[0]
    assert len(every) == 13
    assert [len(one) for one in proven if one == every] == [13]
    for first in range(1, 5):
        assert proven[first] | proven[first + 1] | proven[first + 2] == every
    assert max(len(one) for one in proven[1:]) < 7
    recover(int8.engine, int8.old)


# with a profile folded in


@pytest.fixture(scope="module")
def smoothing(checkpoints: tuple[Path, Path]) -> Smoothing:
    """Random factors for all that can be smoothed: WEIGHT has columns that are multiplied and rows that are divided."""
    from transformers import AutoModelForCausalLM

    return random_smoothing(AutoModelForCausalLM.from_pretrained(checkpoints[1]), seed=3, largest=2)


def telemetry_of_second_update(bench: Bench, streams: list[Tensors], **settings: object) -> Telemetry:
    """streams: the weights of two updates.  settings: of the WeightUpdate."""
    update = new_update(bench.engine, **settings)
    _, second = (take(bench.engine, sent(one, number=n), update=update) for n, one in enumerate(streams, start=1))
    assert (second.layers_proven, second.unproven) == (13, 0)
    return second.telemetry


def test_the_telemetry_of_a_smoothed_update_is_of_the_folded_weights(int8: Bench, smoothing: Smoothing) -> None:
    """What the engine multiplies by, not what was sent. The four numbers of plain updates: test_engine_telemetry.py.
    Rows of random weights have one largest code, smoothed or not."""
    sent_states = [int8.old, int8.new]
    folded_states = [[(name, fold(name, value, smoothing=smoothing)) for name, value in one] for one in sent_states]
    smoothed = telemetry_of_second_update(int8, sent_states, smoothing=smoothing)
    assert smoothed == telemetry_of_second_update(int8, folded_states)
    plain = telemetry_of_second_update(int8, sent_states)
    same = {name for name, value in dataclasses.asdict(plain).items() if getattr(smoothed, name) == value}
    assert same <= {"saturated_fraction"}
    recover(int8.engine, int8.old)


def test_faults_of_a_smoothed_update_are_caught(int8: Bench, smoothing: Smoothing) -> None:
    """One in what was sent, and one behind the folding: in what vLLM is given."""
    stream = sent(int8.new)
    flipped = flip_bit(dict(stream)[WEIGHT], at=0.5, bit=0)
    behind = given_to_vllm(WEIGHT, lambda tensor: flip_bit(tensor, at=0.5, bit=15))
    for around, broken, says in (
        (nullcontext(), replaced(stream, WEIGHT, flipped), f"{WEIGHT} arrived with digest"),
        (behind, stream, "model.layers.1.mlp.gate_up_proj on rank 0 is not as received: "),
    ):
        with around, pytest.raises(SyncError, match=says):
            take(int8.engine, broken, update=new_update(int8.engine, smoothing=smoothing))
        recover(int8.engine, int8.old)


# before transport: what the sender reads is not what was digested


@pytest.mark.parametrize("scheme", ["int8", "bf16"])
def test_a_bit_flipped_before_transport(scheme: str, request: pytest.FixtureRequest) -> None:
    bench: Bench = request.getfixturevalue(scheme)
    tally = Tally(f"bit of a tensor, before transport ({scheme})")
    stream = sent(bench.new)
    for name in spread([name for name, _ in bench.new]):
        for place in PLACES:
            for bit in (0, 6, 9, 15):
                bad = flip_bit(dict(stream)[name], at=place, bit=bit)
                broken = replaced(stream, name, bad)
                bench.attempt(tally, f"{name} {place} {bit}", broken, says=f"{name} (arrived with digest|{NOT_FINITE})")
    settle(tally, cases=7 * 3 * 4)


def test_the_error_names_the_tensor_both_digests_and_the_rank(int8: Bench) -> None:
    stream = sent(int8.new)
    bad = flip_bit(dict(stream)[NORM], at=0.5, bit=0)
    with pytest.raises(SyncError) as raised:
        take(int8.engine, replaced(stream, NORM, bad))
    from appliance.sync.manifest import digest

    was, came = digest(dict(stream)[NORM]), digest(bad)
    said = f"weight update 1: {NORM} arrived with digest {came}, it was sent with {was} (rank 0)"
    assert raised.value.message == said
    assert raised.value.exit_code == 4
    recover(int8.engine, int8.old)


@pytest.mark.parametrize("scheme", ["int8", "bf16"])
def test_a_dropped_tensor(scheme: str, request: pytest.FixtureRequest) -> None:
    """Quantised and not; a bias that vLLM would not miss, too."""
    bench: Bench = request.getfixturevalue(scheme)
    tally = Tally(f"tensor dropped ({scheme})")
    stream = sent(bench.new)
    for name in spread([name for name, _ in bench.new]):
        broken = [pair for pair in stream if pair[0] != name]
        bench.attempt(tally, name, broken, says=f"{name} was sent and did not arrive")
    settle(tally, cases=7)


def test_two_layers_swapped(int8: Bench) -> None:
    """Same shapes, so that nothing but the digest can tell."""
    tally = Tally("two layers swapped, before transport (int8)")
    stream = sent(int8.new)
    parts = ("mlp.up_proj.weight", "mlp.down_proj.weight", "self_attn.q_proj.bias", "input_layernorm.weight")
    for part in parts:
        for layer, other in ((0, 1), (0, 2), (1, 2)):
            first, second = f"model.layers.{layer}.{part}", f"model.layers.{other}.{part}"
            tensors = dict(stream)
            tensors[first], tensors[second] = tensors[second], tensors[first]
            broken = list(tensors.items())
            int8.attempt(tally, f"{first} {second}", broken, says=f"{first} arrived with digest")
    settle(tally, cases=12)


def test_a_cropped_shard(int8: Bench) -> None:
    """A row or a column less, and a part that fills its place because it came twice."""
    tally = Tally("cropped shard (int8)")
    stream = sent(int8.new)
    names = [f"model.layers.{n}.mlp.{part}_proj.weight" for n in range(3) for part in ("gate", "down")]
    for name in [*names, EMBEDDING]:
        whole = dict(stream)[name]
        half = torch.cat([whole[: len(whole) // 2]] * 2)
        shape = f"vLLM refused {name} of shape|{name} was sent as"
        for kind, bad, says in (
            ("row", whole[:-1], shape),
            ("column", whole[:, :-1].contiguous(), shape),
            ("half twice", half, f"{name} arrived with digest"),
        ):
            int8.attempt(tally, f"{name} {kind}", replaced(stream, name, bad), says=says)
    settle(tally, cases=21)


def test_a_list_that_is_not_the_updates_own(int8: Bench) -> None:
    tally = Tally("list of tensors missing, of another update, damaged or not at the end (int8)")
    stream, other = sent(int8.new), sent(int8.old, number=1)
    late = sent(int8.new, number=2)
    manifest = stream[-1]
    cases = {
        "missing": (stream[:-1], "the list of what was sent is missing"),
        "of other weights": ([*stream[:-1], other[-1]], "arrived with digest .* and 35 more"),
        "of another number": (late, "the trainer sent number 2, this worker has taken 0 before"),
        "damaged": ([*stream[:-1], (MANIFEST_NAME, manifest[1][:-7])], "the list of what was sent cannot be read"),
        "one bit": (
            [*stream[:-1], (MANIFEST_NAME, flip_bit(manifest[1], at=0.5, bit=0))],
            "cannot be read|was sent with|was sent as|did not arrive|was not sent",
        ),
        "first": ([manifest, *stream[:-1]], f"{stream[0][0]} came after the list of what was sent"),
        "twice": ([*stream, manifest], "the list of what was sent came twice"),
        "too much": (
            [*stream[:-1], ("lm_head.weight", dict(stream)[EMBEDDING]), manifest],
            "lm_head.weight arrived and was not sent",
        ),
    }
    for case, (broken, says) in cases.items():
        int8.attempt(tally, case, broken, says=says)
    settle(tally, cases=8)


# inside transport: in verl's shared memory


@pytest.fixture
def socket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    from verl.workers.rollout.vllm_rollout import utils

    monkeypatch.setattr(utils, "set_death_signal", lambda: None)
    monkeypatch.setenv("VERL_RAY_JOB_ID", f"fault-{os.getpid()}")
    monkeypatch.setenv("VERL_REPLICA_RANK", "0")
    yield f"/tmp/rl-colocate-zmq-fault-{os.getpid()}-replica-0-rank-0.sock"


@pytest.mark.parametrize("fault", ["bit in a bucket", "end of a bucket overwritten", "bucket truncated"])
def test_faults_inside_transport(fault: str, int8: Bench, socket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first, a middle and the last bucket: bits of its first, middle and last tensor; zeros from the half of a
    tensor on; tensors that its table no longer has."""
    from appliance.engine.sync import DrainingReceiver

    original = DrainingReceiver._bucket
    tally = Tally(f"{fault} (int8)")
    stream = sent(int8.new)
    count = 5
    for number in (0, count // 2, count - 1):
        for place in PLACES:
            bucket = damaging(original, number=number, fault=fault, place=place)
            monkeypatch.setattr(DrainingReceiver, "_bucket", bucket)
            int8.attempt(
                tally,
                f"{number} {place}",
                run=lambda: transfer(int8.engine, stream, socket=socket, bucket_bytes=BUCKET_BYTES),
                says=TRANSPORT[fault],
            )
    monkeypatch.setattr(DrainingReceiver, "_bucket", original)
    settle(tally, cases=9)
    del int8.engine.worker._appliance_update
    assert count == len(buckets_of(int8, stream, socket=socket, monkeypatch=monkeypatch))


def damaging(original: Callable[..., Tensors], *, number: int, fault: str, place: float) -> Callable[..., Tensors]:
    """The receiver's method that makes tensors of a bucket, with a fault in one of them."""
    seen = 0

    def bucket(self: object, metadata: dict) -> Tensors:
        nonlocal seen
        if seen == number:
            damage(self, metadata, fault=fault, place=place)
        seen += 1
        return original(self, metadata)

    return bucket


def damage(receiver: object, metadata: dict, *, fault: str, place: float) -> None:
    names = list(metadata["bucket_meta"])
    name = names[round(place * (len(names) - 1))]
    meta = metadata["bucket_meta"][name]
    size = meta["dtype"].itemsize * meta["shape"].numel()
    before, tables = receiver.buffer.clone(), len(names)
    if fault == "bit in a bucket":
        receiver.buffer[meta["offset"] + size // 2] ^= 1 << int(7 * place)
    elif fault == "end of a bucket overwritten":
        receiver.buffer[meta["offset"] + size // 2 :] = 0
    else:
        for late in names[names.index(name) :]:
            del metadata["bucket_meta"][late]
    changed = not torch.equal(receiver.buffer, before) or len(metadata["bucket_meta"]) < tables
    assert changed, "the fault changed nothing"


def buckets_of(bench: Bench, stream: Tensors, *, socket: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tensors per bucket of an update without a fault."""
    from appliance.engine.update import WeightUpdate

    bucket_sizes, original = [], WeightUpdate.load

    def load(self: WeightUpdate, bucket: Tensors) -> None:
        bucket_sizes.append(len(bucket))
        original(self, bucket)

    monkeypatch.setattr(WeightUpdate, "load", load)
    transfer(bench.engine, stream, socket=socket, bucket_bytes=BUCKET_BYTES)
    monkeypatch.setattr(WeightUpdate, "load", original)
    del bench.engine.worker._appliance_update
    recover(bench.engine, bench.old)
    return bucket_sizes

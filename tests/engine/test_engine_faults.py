"""What goes wrong with a weight update is caught: every fault, at several places, and none slips through.

The numbers that are asserted here are those of the table in docs/reliability.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engines import Engine, free_engine, read_checkpoint, start_engine
from faults import (
    Bench,
    Tally,
    Tensors,
    before_proof,
    flip_bit,
    free_scale,
    given_to_vllm,
    new_update,
    rebuild_handle,
    recover,
    sent,
    take,
    transfer,
)
from test_engine_int8 import checkpoint_layer, linear_layers
from torch import Tensor

from appliance.errors import SyncError
from appliance.quant.codec import quantise, quantise_int8
from appliance.quant.manifest import MANIFEST_NAME
from appliance.quant.scheme import Scheme

pytestmark = pytest.mark.engine

TABLE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
PLACES = (0.0, 0.5, 1.0)  # first, middle and last element
NORM, BIAS, EMBEDDING = "model.norm.weight", "model.layers.1.self_attn.k_proj.bias", "model.embed_tokens.weight"
WEIGHT = "model.layers.1.mlp.up_proj.weight"
LAYERS = ("model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj", "model.layers.2.mlp.down_proj")
BUCKET_BYTES = 300_000


@pytest.fixture(scope="module")
def int8(checkpoints: tuple[Path, Path]) -> Iterator[Bench]:
    yield from bench(checkpoints, scheme="int8")


@pytest.fixture(scope="module")
def bf16(checkpoints: tuple[Path, Path]) -> Iterator[Bench]:
    yield from bench(checkpoints, scheme="bf16")


def bench(checkpoints: tuple[Path, Path], **settings: object) -> Iterator[Bench]:
    engine = start_engine(checkpoints[0], worker_extension_cls="appliance.engine.sync.SyncWorkerExtension", **settings)
    yield Bench(engine, old=read_checkpoint(checkpoints[0]), new=read_checkpoint(checkpoints[1]))
    free_engine(engine)


def settle(tally: Tally, *, cases: int) -> None:
    """Everything was caught, and the table says so."""
    print(tally)
    assert tally.missed == []
    assert tally.caught == tally.injected == cases
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith(f"| {tally.fault} |")]
    assert [row.split("|")[-3:-1] for row in rows] == [[f" {cases} ", f" {cases} "]], tally.fault


def spread(names: list[str]) -> list[str]:
    """Of a stream sorted by name: the first, the last, and of each kind of tensor one in between."""
    chosen = [names[0], "model.layers.0.self_attn.q_proj.weight", BIAS, WEIGHT, "model.layers.2.mlp.down_proj.weight"]
    chosen += ["model.layers.2.input_layernorm.weight", names[-1]]
    assert chosen[0] == EMBEDDING and chosen[-1] == NORM and len(set(chosen)) == 7
    return chosen


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
        assert (report.proven.layers, report.proven.layers_proven, report.proven.unproven) == (13, 13, 0)
        assert report.proven.parameters == 17  # norms, biases, embedding
    assert len(report.manifest) == 32
    recover(bench.engine, bench.old)


def test_a_rotating_sample_proves_every_layer_in_turn(int8: Bench) -> None:
    """All at the first update and at each third; between them each layer once."""
    update = new_update(int8.engine, prove_every=3)
    proven = []
    for number in range(1, 8):
        take(int8.engine, sent(int8.new, number=number), update=update)
        proven.append(set(update._proof._kernels))
    every = proven[0]
    assert len(every) == 13
    assert [len(one) for one in proven if one == every] == [13, 13, 13]  # updates 1, 3 and 6
    assert proven[3] | proven[4] | proven[5] == every and len(proven[3]) < 7
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
                bench.attempt(tally, f"{name} {place} {bit}", broken, layer=name)
    settle(tally, cases=7 * 3 * 4)


def test_the_error_names_the_tensor_and_both_digests(int8: Bench) -> None:
    stream = sent(int8.new)
    bad = flip_bit(dict(stream)[NORM], at=0.5, bit=0)
    with pytest.raises(SyncError) as raised:
        take(int8.engine, replaced(stream, NORM, bad))
    from appliance.quant.digest import digest

    was, came = digest(dict(stream)[NORM]), digest(bad)
    assert raised.value.message == f"weight update 1: {NORM} arrived with digest {came}, it was sent with {was}"
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
        bench.attempt(tally, name, broken, layer=name)
    settle(tally, cases=7)


def test_two_layers_swapped(int8: Bench) -> None:
    """Same shapes, so that nothing but the digest can tell."""
    tally = Tally("two layers swapped, before transport (int8)")
    stream = sent(int8.new)
    parts = ("mlp.up_proj.weight", "mlp.down_proj.weight", "self_attn.q_proj.bias", "input_layernorm.weight")
    for part in parts:
        for one, other in ((0, 1), (0, 2), (1, 2)):
            first, second = f"model.layers.{one}.{part}", f"model.layers.{other}.{part}"
            tensors = dict(stream)
            tensors[first], tensors[second] = tensors[second], tensors[first]
            broken = list(tensors.items())
            int8.attempt(tally, f"{first} {second}", broken, layer=first)
    settle(tally, cases=12)


def test_a_cropped_shard(int8: Bench) -> None:
    """A row or a column less, and a part that fills its place because it came twice."""
    tally = Tally("cropped shard (int8)")
    stream = sent(int8.new)
    names = [f"model.layers.{n}.mlp.{part}_proj.weight" for n in range(3) for part in ("gate", "down")]
    for name in [*names, EMBEDDING]:
        whole = dict(stream)[name]
        half = torch.cat([whole[: len(whole) // 2]] * 2)
        for kind, bad in (("row", whole[:-1]), ("column", whole[:, :-1].contiguous()), ("half twice", half)):
            broken = replaced(stream, name, bad)
            int8.attempt(tally, f"{name} {kind}", broken, layer=name)
    settle(tally, cases=21)


def test_a_list_that_is_not_the_updates_own(int8: Bench) -> None:
    tally = Tally("list of tensors missing, of another update, damaged or not at the end (int8)")
    stream, other = sent(int8.new), sent(int8.old, number=1)
    late = sent(int8.new, number=2)
    manifest = stream[-1]
    cases = {
        "missing": stream[:-1],
        "of other weights": [*stream[:-1], other[-1]],
        "of another number": late,
        "damaged": [*stream[:-1], (MANIFEST_NAME, manifest[1][:-7])],
        "one bit": [*stream[:-1], (MANIFEST_NAME, flip_bit(manifest[1], at=0.5, bit=0))],
        "first": [manifest, *stream[:-1]],
        "twice": [*stream, manifest],
        "too much": [*stream[:-1], ("lm_head.weight", dict(stream)[EMBEDDING]), manifest],
    }
    for case, broken in cases.items():
        int8.attempt(tally, case, broken)
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
            seen = []

            def bucket(self: DrainingReceiver, metadata: dict, number: int = number, place: float = place) -> Tensors:
                seen.append(len(metadata["bucket_meta"]))
                if len(seen) - 1 == number:
                    damage(self, metadata, fault=fault, place=place)
                return original(self, metadata)

            monkeypatch.setattr(DrainingReceiver, "_bucket", bucket)
            int8.attempt(
                tally,
                f"{number} {place}",
                run=lambda: transfer(int8.engine, stream, socket=socket, bucket_bytes=BUCKET_BYTES),
            )
            assert len(seen) > number
    monkeypatch.setattr(DrainingReceiver, "_bucket", original)
    settle(tally, cases=9)
    del int8.engine.worker._appliance_update
    assert count == len(buckets_of(int8, stream, socket=socket, monkeypatch=monkeypatch))


def damage(receiver: object, metadata: dict, *, fault: str, place: float) -> None:
    names = list(metadata["bucket_meta"])
    name = names[round(place * (len(names) - 1))]
    meta = metadata["bucket_meta"][name]
    size = meta["dtype"].itemsize * meta["shape"].numel()
    if fault == "bit in a bucket":
        receiver.buffer[meta["offset"] + size // 2] ^= 1 << int(7 * place)
    elif fault == "end of a bucket overwritten":
        receiver.buffer[meta["offset"] + size // 2 :] = 0
    else:
        for late in names[names.index(name) :]:
            del metadata["bucket_meta"][late]


def buckets_of(bench: Bench, stream: Tensors, *, socket: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tensors per bucket of an update without a fault."""
    from appliance.engine.update import WeightUpdate

    found, original = [], WeightUpdate.load

    def load(self: WeightUpdate, bucket: Tensors) -> None:
        found.append(len(bucket))
        original(self, bucket)

    monkeypatch.setattr(WeightUpdate, "load", load)
    transfer(bench.engine, stream, socket=socket, bucket_bytes=BUCKET_BYTES)
    del bench.engine.worker._appliance_update
    recover(bench.engine, bench.old)
    return found


# after transport: what vLLM is given, and what its kernels hold


def test_a_bit_flipped_in_what_vllm_is_given(int8: Bench) -> None:
    """Bits that change a code or a scale (sign, exponent) in quantised weights, any bit elsewhere."""
    tally = Tally("bit of a tensor given to vLLM (int8)")
    for name in spread([name for name, _ in int8.new]):
        bits = (13, 15) if name.endswith("proj.weight") else (0, 6, 13, 15)
        for place in PLACES:
            for bit in bits:
                if name.endswith("proj.weight"):
                    weight = dict(int8.new)[name]
                    flipped = flip_bit(weight, at=place, bit=bit)
                    assert not torch.equal(quantise_int8(weight).codes_NK, quantise_int8(flipped).codes_NK)
                around = given_to_vllm(name, lambda tensor, place=place, bit=bit: flip_bit(tensor, at=place, bit=bit))
                int8.attempt(tally, f"{name} {place} {bit}", around=around)
    settle(tally, cases=7 * 3 * 4 - 3 * 3 * 2)


def test_a_bit_flipped_in_codes(int8: Bench, checkpoints: tuple[Path, Path]) -> None:
    """The kernel's handle rebuilt from codes of which one has one bit flipped: each bit, at several places."""
    tally = Tally("bit of a code in the kernel (int8)")
    layers = linear_layers(int8.engine)
    for name in LAYERS:
        weight = quantise_int8(checkpoint_layer(checkpoints[1], name)[0])
        for place in (0.0, 0.31, 0.5, 0.77, 1.0):
            for bit in range(8):
                codes = flip_bit(weight.codes_NK, at=place, bit=bit)
                held = layers[name].quant_method.held_scale(layers[name])
                around = before_proof(lambda c=codes, h=held, n=name: rebuild_handle(layers[n], c, h))
                int8.attempt(tally, f"{name} {place} {bit}", around=around, layer=name)
    settle(tally, cases=3 * 5 * 8)


def test_a_handle_rebuilt_from_the_right_codes_is_proven(int8: Bench, checkpoints: tuple[Path, Path]) -> None:
    """What the test above does, without its fault."""
    layers = linear_layers(int8.engine)
    for name in LAYERS:
        codes = quantise_int8(checkpoint_layer(checkpoints[1], name)[0]).codes_NK
        with before_proof(lambda c=codes, n=name: rebuild_handle(layers[n], c, layers[n].quant_method._held)):
            take(int8.engine, sent(int8.new))
    recover(int8.engine, int8.old)


def test_a_bit_flipped_in_a_scale(int8: Bench) -> None:
    """In the memory that the kernel reads."""
    tally = Tally("bit of a scale in the kernel's memory (int8)")
    layers = linear_layers(int8.engine)
    for name in LAYERS:
        for place in PLACES:
            for bit in (0, 7, 15, 22, 23, 30, 31):

                def inject(name: str = name, place: float = place, bit: int = bit) -> None:
                    held = layers[name].quant_method.held_scale(layers[name])
                    held.copy_(flip_bit(held, at=place, bit=bit))

                int8.attempt(tally, f"{name} {place} {bit}", around=before_proof(inject), layer=name)
    settle(tally, cases=3 * 3 * 7)


def test_a_freed_scale(int8: Bench, checkpoints: tuple[Path, Path]) -> None:
    """The handle keeps only the address; somebody else's values lie there now."""
    tally = Tally("scale freed while the kernel reads it (int8)")
    layers = linear_layers(int8.engine)
    for name in layers:
        codes = quantise_int8(checkpoint_layer(checkpoints[1], name)[0]).codes_NK
        changed = []
        around = before_proof(lambda n=name, c=codes, found=changed: found.append(free_scale(layers[n], c)))
        int8.attempt(tally, name, around=around, layer=name)
        assert changed == [True]
        layers[name].junk = None
    settle(tally, cases=12)


def test_a_layer_that_kept_its_old_weights(int8: Bench) -> None:
    tally = Tally("stale weights in one layer's kernel (int8)")
    for name, layer in linear_layers(int8.engine).items():
        kernel = layer.quant_method.kernel
        before = kernel.dnnl_handler

        def inject(kernel: object = kernel, before: object = before) -> None:
            kernel.dnnl_handler = before

        int8.attempt(tally, name, around=before_proof(inject), layer=name)
    settle(tally, cases=12)


def test_kernels_of_two_layers_swapped(int8: Bench) -> None:
    tally = Tally("kernels of two layers swapped (int8)")
    layers = linear_layers(int8.engine)
    for part in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        for one, other in ((0, 1), (0, 2), (1, 2)):
            first, second = (layers[f"model.layers.{n}.{part}"].quant_method.kernel for n in (one, other))

            def inject(first: object = first, second: object = second) -> None:
                first.dnnl_handler, second.dnnl_handler = second.dnnl_handler, first.dnnl_handler

            name = f"model.layers.{one}.{part}"
            int8.attempt(tally, name, around=before_proof(inject), layer=name)
    settle(tally, cases=12)


@pytest.mark.parametrize("scheme", ["int8", "bf16"])
def test_a_parameter_that_changed_after_the_update(scheme: str, request: pytest.FixtureRequest) -> None:
    """What is used as it came: norms, biases, the embedding."""
    bench: Bench = request.getfixturevalue(scheme)
    tally = Tally(f"bit of a norm, bias or embedding in the model ({scheme})")
    held = dict(bench.engine.model.named_parameters())
    for name in (NORM, "model.layers.0.input_layernorm.weight", "model.layers.2.self_attn.qkv_proj.bias", EMBEDDING):
        for place in PLACES:
            for bit in (0, 7, 15):

                def inject(name: str = name, place: float = place, bit: int = bit) -> None:
                    parameter = held[name].data
                    parameter.copy_(flip_bit(parameter, at=place, bit=bit))

                bench.attempt(tally, f"{name} {place} {bit}", around=before_proof(inject))
    settle(tally, cases=4 * 3 * 3)


def test_a_packed_copy_that_stayed_behind(bf16: Bench) -> None:
    """BF16 kernels on a CPU multiply by a packed copy: all linear layers and the tied head."""
    tally = Tally("packed BF16 copy that stayed behind (bf16)")
    layers = linear_layers(bf16.engine) | {"lm_head": bf16.engine.model.lm_head}
    for name, layer in layers.items():

        def inject(layer: torch.nn.Module = layer, before: object = layer.cpu_linear) -> None:
            layer.cpu_linear = before

        bf16.attempt(tally, name, around=before_proof(inject), layer=name)
    settle(tally, cases=13)


@pytest.mark.parametrize("scheme", ["fp8", "fp8-channel", "fp8-block"])
def test_faults_in_emulated_layers(scheme: str, checkpoints: tuple[Path, Path]) -> None:
    tally = Tally(f"bit of a code or a scale ({scheme}, emulated)")
    for bench_ in bench(checkpoints, scheme=scheme, emulated=True):
        report = take(bench_.engine, sent(bench_.new))
        assert report.proven.layers_proven == 13
        recover(bench_.engine, bench_.old)
        layers = linear_layers(bench_.engine)
        for name in LAYERS:
            expected = quantise(checkpoint_layer(checkpoints[1], name)[0], scheme=Scheme(scheme))
            for place in PLACES:
                for what, bits in (("weight", (0, 3, 7)), ("weight_scale", (0, 22, 30))):
                    for bit in bits:

                        def inject(name: str = name, what: str = what, place: float = place, bit: int = bit) -> None:
                            held = getattr(layers[name], what).data
                            held.copy_(flip_bit(held, at=place, bit=bit))

                        bench_.attempt(tally, f"{name} {what} {place} {bit}", around=before_proof(inject), layer=name)
            assert expected.codes_NK.shape == layers[name].weight.shape
    settle(tally, cases=3 * 3 * 6)

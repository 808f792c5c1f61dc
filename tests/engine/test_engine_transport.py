"""verl's real sender against our receiver in a real engine: a whole update, and every way in which one can go wrong."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from engines import Engine, make_checkpoint, read_checkpoint, start_engine
from torch import Tensor

from appliance.errors import SyncError

pytestmark = pytest.mark.engine

Tensors = list[tuple[str, Tensor]]

BUCKET_BYTES = 300_000  # the largest tensor has 131072 in BF16 and 262144 in FP32; a checkpoint has 1.4 MB
ANSWER_S = 10.0  # a sender that waits longer waits for ever: nothing here takes a second
GONE_S = 30.0  # of a weight update in another process, on a busy machine
POSITIONS = ("first", "middle", "last")


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A socket name of this process, and nothing left behind by any test."""
    from verl.workers.rollout.vllm_rollout import utils

    monkeypatch.setattr(
        utils, "set_death_signal", lambda: None
    )  # else this process dies with the thread that started it
    monkeypatch.setenv("VERL_RAY_JOB_ID", f"test-{os.getpid()}")
    monkeypatch.setenv("VERL_REPLICA_RANK", "0")
    before = segments()
    yield
    assert that_stay(segments() - before) == set()
    assert not socket_path().exists()
    assert not any(thread.name == "sender" for thread in threading.enumerate())


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("verl_weights_*")}


def that_stay(names: set[str]) -> set[str]:
    """Without those of a training beside this test, each of which is gone when its weight update is."""
    deadline = time.monotonic() + GONE_S
    while names and time.monotonic() < deadline:
        time.sleep(0.05)
        names &= segments()
    return names


def socket_path() -> Path:
    """Where verl's worker extension looks for the sender of this job, replica and rank."""
    return Path(f"/tmp/rl-colocate-zmq-test-{os.getpid()}-replica-0-rank-0.sock")


def start(folder: Path, *, scheme: str = "int8") -> Engine:
    return start_engine(folder, scheme=scheme, worker_extension_cls="appliance.engine.sync.SyncWorkerExtension")


class Sender(threading.Thread):
    """verl's sender, as its trainer runs it: in an event loop of its own, over shared memory."""

    def __init__(self, tensors: Tensors, *, bucket_bytes: int) -> None:
        super().__init__(name="sender", daemon=True)
        self.tensors, self.bucket_bytes = tensors, bucket_bytes
        self.error: BaseException | None = None
        self.answered_s = 0.0

    def run(self) -> None:
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

        sender = BucketedWeightSender(zmq_handle=f"ipc://{socket_path()}", bucket_size_mb=1, use_shm=True)
        sender.bucket_size = self.bucket_bytes
        try:
            asyncio.run(sender.async_send_weights(iter(self.tensors)))
        except BaseException as error:
            self.error = error


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises in the main thread, again every second: a receiver that hangs, and hangs again while it cleans up."""

    def expire(signum: int, frame: object) -> None:
        raise TimeoutError(f"still waiting after {seconds} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def transfer(engine: Engine, tensors: Tensors, *, bucket_bytes: int = BUCKET_BYTES) -> None:
    """One update as verl makes it: the sender in one thread, the engine's worker called by name in this one.

    Raises what the worker raises, after the sender came back.
    """
    sender = Sender(tensors, bucket_bytes=bucket_bytes)
    sender.start()
    try:
        with deadline(3 * ANSWER_S):
            engine.llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
    finally:
        sender.join(ANSWER_S)
        assert not sender.is_alive(), "the sender still waits for an answer"
        assert sender.error is None


@dataclass
class Spy:
    """Which names each bucket brought to an update, and in which of them the update fails for a reason of its own."""

    buckets: list[list[str]] = field(default_factory=list)
    fail_at: int | None = None


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    from appliance.engine.update import WeightUpdate

    spy, original = Spy(), WeightUpdate.load

    def load(self: WeightUpdate, bucket: Tensors) -> None:
        spy.buckets.append([name for name, _ in bucket])
        if len(spy.buckets) - 1 == spy.fail_at:
            raise MemoryError(f"bucket {spy.fail_at}")
        original(self, bucket)

    monkeypatch.setattr(WeightUpdate, "load", load)
    return spy


@pytest.mark.parametrize("scheme", ["int8", "bf16"])
@pytest.mark.parametrize(("bucket_bytes", "num_buckets"), [(16 << 20, 1), (BUCKET_BYTES, 5), (131072, 13)])
def test_an_update_equals_a_fresh_engine(
    scheme: str, bucket_bytes: int, num_buckets: int, checkpoints: tuple[Path, Path], spy: Spy
) -> None:
    engine = start(checkpoints[0], scheme=scheme)
    first = engine.generate()
    tensors = read_checkpoint(checkpoints[1])
    transfer(engine, tensors, bucket_bytes=bucket_bytes)
    assert [name for bucket in spy.buckets for name in bucket] == [name for name, _ in tensors]
    assert len(spy.buckets) == num_buckets
    second = engine.generate()
    assert second == start(checkpoints[1], scheme=scheme).generate()
    assert second != first
    transfer(engine, read_checkpoint(checkpoints[0]), bucket_bytes=bucket_bytes)
    assert engine.generate() == first


def test_an_update_of_a_model_behind_cuda_graphs(
    checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tensors = start(checkpoints[0]), read_checkpoint(checkpoints[1])
    engine.behind_graphs(monkeypatch)
    transfer(engine, tensors)
    assert engine.generate() == start(checkpoints[1]).generate()


@pytest.mark.parametrize("scheme", ["int8", "bf16"])
def test_float32_weights_are_rounded_to_bf16(scheme: str, checkpoints: tuple[Path, Path]) -> None:
    """FSDP's masters are FP32: the engine must hold what it would hold had the trainer rounded them."""
    engine = start(checkpoints[0], scheme=scheme)
    generator = torch.Generator().manual_seed(8)
    masters = [
        (name, tensor.float() * (1 + 2.0**-9 * torch.randn(tensor.shape, generator=generator)))
        for name, tensor in read_checkpoint(checkpoints[1])
    ]
    rounded = [(name, tensor.to(torch.bfloat16)) for name, tensor in masters]
    assert all(not torch.equal(tensor, rounded[i][1].float()) for i, (_, tensor) in enumerate(masters))
    transfer(engine, rounded)
    expected = engine.generate()
    transfer(engine, read_checkpoint(checkpoints[0]))
    assert engine.generate() != expected
    transfer(engine, masters)
    assert engine.generate() == expected


def test_bare_verl_takes_updates_by_vllms_own_reload(checkpoints: tuple[Path, Path]) -> None:
    """The peer of `benchmarks.step`: weights in float32, as verl's FSDP sends them, and layers in several buckets."""
    extension = "benchmarks.step.verl_weights.LayerwiseExtension"
    engine = start_engine(checkpoints[0], scheme="bf16", worker_extension_cls=extension)
    first = engine.generate()
    transfer(engine, [(name, tensor.float()) for name, tensor in read_checkpoint(checkpoints[1])])
    assert engine.generate() == start(checkpoints[1], scheme="bf16").generate()
    transfer(engine, read_checkpoint(checkpoints[0]), bucket_bytes=131072)
    assert engine.generate() == first


def test_what_arrived_is_the_engines_own(checkpoints: tuple[Path, Path]) -> None:
    """The sender reuses its bucket and then frees it: a tensor that waits for its layer must not change with it."""
    engine = start(checkpoints[0])
    tensors = dict(read_checkpoint(checkpoints[1]))
    last = [name for name in tensors if "up_proj" in name or "k_proj" in name]
    order = [name for name in tensors if name not in last] + last
    transfer(engine, [(name, tensors[name]) for name in order], bucket_bytes=131072)
    assert engine.generate() == start(checkpoints[1]).generate()


def test_the_tied_heads_own_tensor_is_skipped(checkpoints: tuple[Path, Path]) -> None:
    """A trainer's state names the embedding twice where the head is tied to it."""
    engine = start(checkpoints[0])
    tensors = read_checkpoint(checkpoints[1])
    transfer(engine, [*tensors, ("lm_head.weight", dict(tensors)["model.embed_tokens.weight"])])
    assert engine.generate() == start(checkpoints[1]).generate()


SEND = """
import asyncio, sys
from safetensors.torch import load_file
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
sender = BucketedWeightSender(zmq_handle=sys.argv[1], bucket_size_mb=1, use_shm=True)
asyncio.run(sender.async_send_weights(iter(sorted(load_file(sys.argv[2]).items()))))
"""


def test_a_sender_in_another_process(checkpoints: tuple[Path, Path]) -> None:
    """As in a run: the trainer is a process of its own, and the segment is mapped twice."""
    engine = start(checkpoints[0])
    command = [sys.executable, "-c", SEND, f"ipc://{socket_path()}", str(checkpoints[1] / "model.safetensors")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child, deadline(90):
        engine.llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
        _, said = child.communicate(timeout=30)
    assert child.returncode == 0, said
    assert engine.generate() == start(checkpoints[1]).generate()


@dataclass
class Fault:
    """Turns a good stream into a bad one, and counts how often it did."""

    change: Callable[[str, Tensor], Tensors]
    injected: int = 0

    def apply(self, tensors: Tensors, *, at: str) -> Tensors:
        out: Tensors = []
        for name, tensor in tensors:
            if name == at:
                self.injected += 1
                out += self.change(name, tensor)
            else:
                out.append((name, tensor))
        return out


def with_nan(name: str, tensor: Tensor) -> Tensors:
    bad = tensor.clone()
    bad.view(-1)[-1] = float("nan")
    return [(name, bad)]


CHANGES: dict[str, Callable[[str, Tensor], Tensors]] = {
    "not-finite": with_nan,
    "wrong-shape": lambda name, tensor: [(name, tensor.reshape(1, -1).clone())],
    "one-row-less": lambda name, tensor: [(name, tensor[:-1])],
    "unknown-name": lambda name, tensor: [(name, tensor), ("model.layers.0.mlp.side_proj.weight", tensor)],
    "unknown-bias": lambda name, tensor: [(name, tensor), ("model.layers.0.mlp.up_proj.bias", torch.ones(352))],
    "missing": lambda name, tensor: [],
    "callback": lambda name, tensor: [(name, tensor)],
}


def at(position: str, buckets: list[list[str]]) -> tuple[int, str]:
    """(bucket, tensor) of a fault: in the first and the middle bucket its second tensor, in the last the last one."""
    if position == "last":
        return len(buckets) - 1, buckets[-1][-1]
    index = {"first": 0, "middle": len(buckets) // 2}[position]
    return index, buckets[index][min(1, len(buckets[index]) - 1)]


def expected(kind: str, *, name: str, shape: list[int]) -> str:
    """The start of SyncError's message; the whole of it where vLLM has no part in it."""
    return {
        "not-finite": f"weight update: {name} has a value that is not finite",
        "wrong-shape": f"weight update: vLLM refused {name} of shape {[1, math.prod(shape)]}: ",
        "one-row-less": f"weight update: vLLM refused {name} of shape {[shape[0] - 1, *shape[1:]]}: ",
        "unknown-name": "weight update: vLLM refused model.layers.0.mlp.side_proj.weight of shape "
        f"{shape}: ValueError: There is no module or parameter named 'layers.0.mlp.side_proj' in Qwen2Model.",
        "unknown-bias": "weight update: model.layers.0.mlp.up_proj.bias is not a weight of this model",
        "missing": "weight update: 1 layer did not receive all its weights: ",
    }[kind]


@pytest.mark.parametrize("kind", CHANGES)
def test_an_error_ends_the_update_and_never_the_senders_wait(
    kind: str, checkpoints: tuple[Path, Path], spy: Spy
) -> None:
    """Each kind in the first, a middle and the last bucket, each in an engine of its own."""
    folder = make_checkpoint(checkpoints[0].parent / f"untied-{kind}", seed=21, tied=False)
    good = read_checkpoint(folder)
    fault = Fault(CHANGES[kind])
    for position in POSITIONS:
        engine = start(folder)
        spy.buckets.clear()
        spy.fail_at = None
        transfer(engine, good)
        buckets = list(spy.buckets)
        assert len(buckets) > 4
        index, name = at(position, buckets)
        spy.buckets.clear()
        spy.fail_at = index if kind == "callback" else None
        started = time.monotonic()
        with pytest.raises(MemoryError if kind == "callback" else SyncError) as raised:
            transfer(engine, fault.apply(good, at=name))
        assert time.monotonic() - started < ANSWER_S
        if kind == "callback":
            assert str(raised.value) == f"bucket {index}"
        else:
            assert raised.value.message.startswith(expected(kind, name=name, shape=list(dict(good)[name].shape)))
        # Nothing is loaded after the error. A tensor more or less can move its neighbours to the next bucket.
        stopped = len(buckets) - 1 if kind == "missing" else index
        assert abs(len(spy.buckets) - 1 - stopped) <= (kind in ("unknown-name", "unknown-bias"))
        refuses_further_updates(engine, good, spy=spy)
    assert fault.injected == len(POSITIONS) == 3
    assert len(CHANGES) * len(POSITIONS) == 21


def refuses_further_updates(engine: Engine, good: Tensors, *, spy: Spy) -> None:
    """The half-updated engine says why, and the sender of the next update does not wait either."""
    fault = engine.worker._appliance_update.fault or "an earlier update did not finish"
    spy.buckets.clear()
    with pytest.raises(SyncError) as raised:
        transfer(engine, good)
    assert raised.value.message == f"weight update: the engine's weights are half-updated: {fault}"
    assert spy.buckets == []


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (
            "model.layers.2.self_attn.k_proj.bias",
            "weight update: 1 layer did not receive all its weights: "
            "model.layers.2.self_attn.qkv_proj (32960 of 33024 elements)",
        ),
        (
            "model.norm.weight",
            "weight update: 1 layer did not receive all its weights: model.norm (0 of 128 elements)",
        ),
        (
            "model.embed_tokens.weight",
            "weight update: 2 layers did not receive all their weights: "
            "model.embed_tokens (0 of 65536 elements), lm_head (0 of 65536 elements)",
        ),
    ],
)
def test_a_missing_tensor_is_named(missing: str, message: str, checkpoints: tuple[Path, Path]) -> None:
    engine = start(checkpoints[0])
    with pytest.raises(SyncError) as raised:
        transfer(engine, [pair for pair in read_checkpoint(checkpoints[0]) if pair[0] != missing])
    assert raised.value.message == message


def test_adapters_are_refused(checkpoints: tuple[Path, Path]) -> None:
    engine = start(checkpoints[0])
    sender = Sender(read_checkpoint(checkpoints[0]), bucket_bytes=BUCKET_BYTES)
    sender.start()
    with pytest.raises(SyncError) as raised, deadline(3 * ANSWER_S):
        engine.llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True, "peft_config": {"r": 8}})
    sender.join(ANSWER_S)
    assert not sender.is_alive()
    assert raised.value.message == "weight update: an adapter came to an engine that was not started for one"
    transfer(engine, read_checkpoint(checkpoints[0]))  # refused before anything was touched

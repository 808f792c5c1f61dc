"""Faults put into a weight update: before transport, inside it, and after it in what the kernels hold.

Each case is one update of a real engine with one fault. It counts as injected when something really changed (a case
where nothing did fails its test), and as caught when the update ended with the SyncError that this fault must have.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import Engine, free_engine, read_checkpoint, start_engine
from torch import Tensor

from appliance.errors import SyncError
from appliance.terms.schemes import AS_PLANNED, Precision

TABLE = Path(__file__).resolve().parents[2] / "docs" / "weights.md"
PLACES = (0.0, 0.5, 1.0)  # first, middle and last element
NORM, BIAS, EMBEDDING = "model.norm.weight", "model.layers.1.self_attn.k_proj.bias", "model.embed_tokens.weight"
WEIGHT = "model.layers.1.mlp.up_proj.weight"

Tensors = list[tuple[str, Tensor]]
Change = Callable[[Tensors], Tensors]


@dataclass
class Tally:
    """One row of the table in docs/weights.md."""

    fault: str
    injected: int = 0
    caught: int = 0
    missed: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.fault}: injected {self.injected}, caught {self.caught}"


def flip_bit(tensor: Tensor, *, at: float, bit: int) -> Tensor:
    """A copy with one bit of one element flipped. at: position in the tensor, 0 is the first element, 1 the last."""
    flipped = tensor.clone()
    width = tensor.element_size()
    index = round(at * (tensor.numel() - 1)) * width + bit // 8
    flipped.view(-1).view(torch.uint8)[index] ^= 1 << bit % 8
    return flipped


def recover(engine: Engine, tensors: Tensors, *, weight_update: object = None) -> None:
    """Out of an update that broke off, and whole again. No engine of a run ever does this: it refuses. weight_update: a
    WeightUpdate that is kept, and knows the way of each tensor from its first time on; None: a new one."""
    from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

    for layer in engine.model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()
    engine.load(tensors, weight_update=weight_update)


def new_update(engine: Engine, **settings: object):
    """A worker's WeightUpdate as in a run, expecting update number 1. settings: in place of a run's."""
    from appliance.engine.update import WeightUpdate

    return WeightUpdate(
        engine.model, model_config=engine.runner.vllm_config.model_config, **({"needs_manifest": True} | settings)
    )


def sent(
    tensors: Tensors,
    *,
    after: Change = lambda stream: stream,
    number: int = 1,
    precision: Precision = AS_PLANNED,
) -> Tensors:
    """What the trainer's side makes of a state: every tensor digested, the list at the end.

    after: what happens to the stream when all digests are known.  precision: of the engine from this update on.
    """
    from appliance.trainer.sender import DigestedWeights

    async def collect() -> Tensors:
        return [pair async for pair in DigestedWeights(tensors, sync=number, precision=precision)]

    return after(asyncio.run(collect()))


def take(engine: Engine, stream: Tensors, *, update: object = None, proven_layers: set[str] | None = None) -> object:
    """One update in this process. proven_layers: gets the names of the layers whose kernels it checks. Raises
    SyncError."""
    from vllm.config import set_current_vllm_config

    update = update or new_update(engine)
    with set_current_vllm_config(engine.runner.vllm_config), torch.no_grad():
        update.begin()
        update.load([(name, tensor.clone()) for name, tensor in stream])
        if proven_layers is not None:
            proven_layers |= set(update._proof._kernels)
        return update.finish()


def transfer(engine: Engine, stream: Iterable[tuple[str, Tensor]], *, socket: str, bucket_bytes: int) -> None:
    """The same through verl's sender, shared memory and our receiver."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    def send() -> None:
        sender = BucketedWeightSender(zmq_handle=f"ipc://{socket}", bucket_size_mb=1, use_shm=True)
        sender.bucket_size = bucket_bytes
        asyncio.run(sender.async_send_weights(iter(stream)))

    engine.worker._appliance_update = new_update(engine)
    thread = threading.Thread(target=send, name="sender", daemon=True)
    thread.start()
    try:
        engine.llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
    finally:
        thread.join(20)
        assert not thread.is_alive(), "the sender still waits"


@dataclass
class Bench:
    """An engine that has the weights `old`, and is updated to `new` with one fault after another."""

    engine: Engine
    old: Tensors
    new: Tensors

    @functools.cached_property
    def stream(self) -> Tensors:
        """The new weights, sent well."""
        return sent(self.new)

    @functools.cached_property
    def _restoring(self) -> object:
        return self.engine.update()

    def attempt(
        self,
        tally: Tally,
        case: str,
        stream: Tensors | None = None,
        *,
        run: Callable[[], object] | None = None,
        around: AbstractContextManager[None] | None = None,
        layer: str = "",
        says: str = "",
    ) -> None:
        """One update: of `stream` (the new weights, sent well) or as `run` does it, inside `around`.

        layer: of which the proof must say that it is not as received.  says: a pattern that the error must have, where
        the proof is not what catches it. One of them.
        """
        held = "the engine has .*, the tensor received gives "
        says = says or f"{re.escape(layer)} on rank 0 is not as received: .*{held}"
        assert layer or says[0] != " ", "what must the error say?"
        assert stream is None or not _same(stream, self.stream), f"{case}: nothing is wrong with this stream"
        caught = ""
        try:
            with around or nullcontext():
                run() if run else take(self.engine, stream or self.stream)
        except SyncError as error:
            caught = error.message
        finally:  # also where an injection failed: the next test's fault must be one
            recover(self.engine, self.old, weight_update=self._restoring)
        tally.injected += 1
        if re.search(says, caught):
            tally.caught += 1
        else:
            tally.missed.append(f"{case}: {caught or 'not caught'}")


def same_bytes(one: Tensor, other: Tensor) -> bool:
    shapes = one.dtype == other.dtype and one.shape == other.shape
    return shapes and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _same(stream: Tensors, other: Tensors) -> bool:
    return [name for name, _ in stream] == [name for name, _ in other] and all(
        same_bytes(one, two) for (_, one), (_, two) in zip(stream, other, strict=True)
    )


def overwrite(parameter: Tensor, values: Tensor) -> bool:
    """In place. Returns whether a byte changed."""
    changed = not same_bytes(parameter, values)
    parameter.copy_(values)
    return changed


@contextmanager
def before_proof(inject: Callable[[], bool]):
    """`inject` runs when vLLM has finished an update, just before the proof asks the kernels. It says whether anything
    changed, and must."""
    from appliance.engine.proof import SyncProof

    original = SyncProof.check

    def check(self: SyncProof):
        assert inject(), "the fault changed nothing"
        return original(self)

    SyncProof.check = check
    try:
        yield
    finally:
        SyncProof.check = original


@contextmanager
def given_to_vllm(name: str, change: Callable[[Tensor], Tensor]):
    """The tensor `name` changes after its digest was checked and after the proof has looked at it."""
    from appliance.engine.update import WeightUpdate

    original = WeightUpdate._give

    def give(self: WeightUpdate, tensor_name: str, tensor: Tensor):
        changed = change(tensor) if tensor_name == name else tensor
        assert tensor_name != name or not same_bytes(changed, tensor), "the fault changed nothing"
        return original(self, tensor_name, changed)

    WeightUpdate._give = give
    try:
        yield
    finally:
        WeightUpdate._give = original


def rebuild_kernel(layer: torch.nn.Module, codes_NK: Tensor, scale_N1: Tensor) -> bool:
    """What an INT8 layer multiplies by, made again from these codes and scales, by the kernel that it has."""
    method = layer.quant_method
    before = method.gemm
    method.gemm = type(before)(codes_NK, scale_N1=scale_N1)
    return method.gemm is not before


def swap_in(method: object) -> Callable[[], bool]:
    """A function that gives an INT8 layer the kernel back that it has now."""
    before = method.gemm

    def inject() -> bool:
        changed = method.gemm is not before
        method.gemm = before
        return changed

    return inject


def free_scale(layer: torch.nn.Module, codes_NK: Tensor) -> bool:
    """A kernel whose scales nobody holds: other tensors take their memory. Returns whether the memory changed.

    oneDNN's handle goes on reading there, while we still hold the right scales elsewhere; sgl's kernel is handed a
    tensor over that memory. PyTorch asks for aligned memory, which glibc never takes from a thread's small cache, and a
    block that was freed may lie just there: so arrays of about the size are made as well, of memory that malloc gives;
    and where it became a part of a larger free block, larger ones.
    """
    right_N1 = layer.quant_method.held_scale(layer)
    scale_N1 = right_N1.clone()
    rebuild_kernel(layer, codes_NK, scale_N1)
    address, size, before = scale_N1.data_ptr(), scale_N1.nbytes, bytes(scale_N1.view(-1).view(torch.uint8).numpy())
    gemm = layer.quant_method.gemm
    memory = (ctypes.c_float * (size // 4)).from_address(address)
    gemm.scale_N1 = right_N1 if gemm.name == "onednn" else torch.frombuffer(memory, dtype=torch.float32).view(-1, 1)
    del scale_N1
    gc.collect()
    layer.junk: list[object] = []
    for times in (1, 1, 2, 4, 16, 64):
        layer.junk += [torch.full((times * size // 4, 1), float("nan")) for _ in range(400)]
        layer.junk += [np.full(times * size + more, 0xFF, np.uint8) for more in range(0, 80, 16) for _ in range(80)]
        if ctypes.string_at(address, size) != before:
            return True
    return False


@contextmanager
def both_int8_kernels() -> Iterator[None]:
    """On a host where short rows get the one and long rows the other: rows of 128 here, and of 352."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("appliance.quant.cpu_gemm.LONGEST_PACKED_ROW", 128)
        yield


def start_bench(checkpoints: tuple[Path, Path], **settings: object) -> Iterator[Bench]:
    engine = start_engine(checkpoints[0], worker_extension_cls="appliance.engine.sync.SyncWorkerExtension", **settings)
    yield Bench(engine, old=read_checkpoint(checkpoints[0]), new=read_checkpoint(checkpoints[1]))
    free_engine(engine)


def settle(tally: Tally, *, cases: int) -> None:
    """Everything was caught, and the table says so."""
    sys.stdout.write(f"{tally}\n")
    assert tally.missed == []
    assert tally.caught == tally.injected == cases
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith(f"| {tally.fault} |")]
    assert [row.split("|")[-2] for row in rows] == [f" {cases} "], tally.fault


def spread(names: list[str]) -> list[str]:
    """Of a stream sorted by name: the first, the last, and of each kind of tensor one in between."""
    chosen = [names[0], "model.layers.0.self_attn.q_proj.weight", BIAS, WEIGHT, "model.layers.2.mlp.down_proj.weight"]
    chosen += ["model.layers.2.input_layernorm.weight", names[-1]]
    assert chosen[0] == EMBEDDING and chosen[-1] == NORM and len(set(chosen)) == 7
    return chosen

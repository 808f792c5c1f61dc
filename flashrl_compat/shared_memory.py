"""vLLM's native weight transfer between processes of one host without a GPU: backend `shm`, in shared memory.

    vllm serve MODEL --weight-transfer-config '{"backend": "shm"}'

vLLM's own backends need CUDA. A chunk is one segment, which the trainer makes and removes; its description is JSON, so
it travels by vLLM's HTTP routes as well as by Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.model_executor.model_loader.reload import layerwise

from flashrl_compat.sender import with_manifest

BACKEND = "shm"
CHUNK_BYTES = 256 << 20
SEGMENTS = Path("/dev/shm")


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Arguments of a transfer's start: nothing has to be agreed on."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    segment: str
    """Name of the segment in shared memory."""
    names: list[str] = field(default_factory=list)
    """Names of the tensors in it, one behind the other, as in the other lists."""
    dtypes: list[str] = field(default_factory=list)
    """Data types of the tensors by torch's names, without `torch.`."""
    shapes: list[list[int]] = field(default_factory=list)


class ShmEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Receiving end, in a worker. Under FLASHRL_CONFIG the reload that it enters is a proven update
    (engine/ways_in.py)."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        layerwise.initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        layerwise.finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        self.model.load_weights(_read(update_info))

    def shutdown(self) -> None:
        pass


def _read(info: ShmUpdateInfo) -> Iterator[tuple[str, Tensor]]:
    """Read through the file that a segment is on Linux: Python 3.11's SharedMemory takes who opens one for its owner.

    Raises ValueError for a name that no segment has, and for another size than is given.
    """
    if not re.fullmatch(r"\w+", info.segment):
        raise ValueError(f"`{info.segment[:60]}` is not the name of a segment of shared memory")
    content = bytearray((SEGMENTS / info.segment).read_bytes())
    offset = 0
    for name, dtype_name, shape in zip(info.names, info.dtypes, info.shapes, strict=True):
        dtype = getattr(torch, dtype_name)
        size = dtype.itemsize * torch.Size(shape).numel()
        if offset + size > len(content):
            raise ValueError(f"the segment ends before {name}")
        yield name, torch.frombuffer(content, dtype=torch.uint8, offset=offset, count=size).view(dtype).view(shape)
        offset += size


@dataclass
class ShmTrainerInitInfo(TrainerInitInfo):
    backend: ClassVar[str] = BACKEND
    chunk_bytes: int = CHUNK_BYTES
    """Bytes of a segment, which has at least one tensor."""


class ShmTrainer(TrainerWeightTransferEngine[ShmTrainerInitInfo]):
    """Sending end, in the trainer: `WeightTransferTrainerFactory.trainer_init(ShmTrainerInitInfo(rank=0), client=..,
    source=..)`."""

    init_info_cls = ShmTrainerInitInfo

    def __init__(
        self, *, client: VLLMWeightSyncClient, source: WeightSource, is_sender: bool = True, chunk_bytes: int
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._chunk_bytes = chunk_bytes

    @classmethod
    def trainer_init(
        cls, init_info: ShmTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        if source is None:
            raise ValueError("shm sends the weights of a WeightSource, and got none")
        if init_info.is_sender:
            client.init_weight_transfer_engine({})
        return cls(client=client, source=source, is_sender=init_info.is_sender, chunk_bytes=init_info.chunk_bytes)

    def send_weights(self) -> None:
        """Send one whole update. A rank that does not send drives the collectives of the source all the same."""
        if self.is_sender:
            self.client.start_weight_update()
        for chunk in self._chunks():
            if self.is_sender:
                self._send(chunk)
        if self.is_sender:
            self.client.finish_weight_update()

    def _chunks(self) -> Iterator[list[tuple[str, Tensor]]]:
        chunk: list[tuple[str, Tensor]] = []
        chunk_bytes = 0
        for name, tensor in self.source:
            if chunk and chunk_bytes + tensor.nbytes > self._chunk_bytes:
                yield chunk
                chunk, chunk_bytes = [], 0
            chunk.append((name, tensor.detach().cpu().contiguous()))
            chunk_bytes += tensor.nbytes
        if chunk:
            yield chunk

    def _send(self, chunk: list[tuple[str, Tensor]]) -> None:
        segment = SharedMemory(create=True, size=max(1, sum(tensor.nbytes for _, tensor in chunk)))
        try:
            offset = 0
            for _, tensor in chunk:
                segment.buf[offset : offset + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8).numpy().data
                offset += tensor.nbytes
            update_info = {
                "segment": segment.name,
                "names": [name for name, _ in chunk],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in chunk],
                "shapes": [list(tensor.shape) for _, tensor in chunk],
            }
            self.client.update_weights(update_info)
        finally:
            segment.close()
            segment.unlink()


class ManifestSource(WeightSource):
    """Another source's weights, with their digests: each iteration is the update with the next number."""

    def __init__(self, source: WeightSource, *, taken_before: int = 0) -> None:
        """taken_before: how many updates the engine has had."""
        self._source, self._number = source, taken_before

    def metadata(self) -> list[ParamMeta]:
        raise NotImplementedError("a manifest is known when all weights were sent: this is for the backend shm")

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self._number += 1
        return with_manifest(self._source, number=self._number)


def register() -> None:
    """Register where this module is imported: in a trainer, and by the plugin in an engine. A second call changes
    nothing."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, ShmEngine)
        WeightTransferTrainerFactory.register_engine(BACKEND, ShmTrainer)


register()

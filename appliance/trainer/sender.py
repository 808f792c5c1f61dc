"""verl's sender of weights, with a digest of every tensor: what arrives can be compared with what was meant.

verl looks its rollout class up by name; this one takes that place (trainer/worker.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from verl.workers.rollout.utils import ensure_async_iterator
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from appliance.errors import SyncError
from appliance.sync.manifest import (
    DIRECTIVE_NAME,
    MANIFEST_NAME,
    Manifest,
    TensorRecord,
    precision_tensor,
    record_tensor,
)
from appliance.sync.precision import read_present, read_wanted
from appliance.sync.records import Sent, append_sent
from appliance.terms.environment import PLAN_VARIABLE, weight_socket
from appliance.terms.schemes import AS_PLANNED, Precision
from appliance.trainer.rollout_forward import follow_engines, note_sent

Weights = AsyncIterator[tuple[str, Tensor]] | Iterable[tuple[str, Tensor]]


class DigestedWeights:
    """A stream of weights, each digested just before it goes out, with the manifest as its last tensor."""

    manifest: Manifest | None
    """Manifest of the update; None until the stream has ended."""
    digest_s: float
    """Seconds spent on digests."""

    def __init__(
        self, weights: Weights, *, sync: int, precision: Precision = AS_PLANNED, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """precision: what the engine shall compute in; the first tensor says it where it is not as planned.  dtype:
        type of the trainer's forward, and of the engine."""
        self._weights, self._dtype = weights, dtype
        self._sync = sync
        self._precision = precision
        self.manifest = None
        self.digest_s = 0.0

    async def __aiter__(self) -> AsyncIterator[tuple[str, Tensor]]:
        records: list[TensorRecord] = []
        device = torch.device("cpu")
        async for name, tensor in self._stream():
            rounded = round_as_trainer(tensor, dtype=self._dtype)
            started = time.perf_counter()
            records.append(record_tensor(name, rounded))
            self.digest_s += time.perf_counter() - started
            device = rounded.device
            yield name, rounded
        self.manifest = Manifest(sync=self._sync, records=tuple(records))
        yield MANIFEST_NAME, self.manifest.to_tensor().to(device)

    async def _stream(self) -> AsyncIterator[tuple[str, Tensor]]:
        needs_directive = not self._precision.is_planned
        async for name, tensor in ensure_async_iterator(self._weights):
            if needs_directive:
                yield DIRECTIVE_NAME, precision_tensor(self._precision).to(tensor.device)
                needs_directive = False
            yield name, tensor


def round_as_trainer(tensor: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Round FP32 masters to BF16 or FP16, as FSDP's mixed precision rounds them for every forward (attested). Both
    sides then quantise and compare the same values, and half as many bytes travel."""
    return tensor.to(dtype) if tensor.dtype is torch.float32 else tensor


class DigestingAdapter(ServerAdapter):
    """One per trainer rank; each sends whole tensors to the rollout worker beside it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._syncs = 0
        self._run_dir = Path(os.environ[PLAN_VARIABLE]).parent if PLAN_VARIABLE in os.environ else None
        self.zmq_handle = weight_socket(self.zmq_handle, run_dir=self._run_dir)

    def _ensure_server_handle(self) -> bool:
        """Look the server up by its name each time: it may be another one than before (trainer/engines.py)."""
        self.server_handle = None
        return super()._ensure_server_handle()

    async def update_weights(
        self, weights: Weights, global_steps: int | None = None, wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        """Send the weights, each digested. Raises SyncError for a wire format without named tensors, which no digest
        covers."""
        if wire_format != "named_tensors":
            raise SyncError(f"weight update: the wire format {wire_format} has no digests", hint="use the full update")
        self._syncs += 1
        precision = AS_PLANNED if self._run_dir is None else read_wanted(self._run_dir)
        follow_engines(AS_PLANNED if self._run_dir is None else read_present(self._run_dir))
        dtype = getattr(torch, self.config.dtype)
        digested = DigestedWeights(weights, sync=self._syncs, precision=precision, dtype=dtype)
        await super().update_weights(digested, global_steps=global_steps, **kwargs)
        if digested.manifest is None:
            return
        note_sent(digested.manifest)
        if self._run_dir is not None:
            place = {"replica": self.replica_rank, "rank": self.rollout_rank}
            sent = Sent(sync=self._syncs, manifest=digested.manifest.digest, digest_s=digested.digest_s, **place)
            append_sent(self._run_dir, sent)

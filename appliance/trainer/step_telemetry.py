"""The telemetry of one step of a run: from the TransferQueue, and back into it what must be finite there."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
import transfer_queue
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

from appliance.trainer.telemetry import StepTelemetry, measure_batch, with_finite_pairs

_FIELDS = ("old_log_probs", "rollout_log_probs", "response_mask", "responses")


def measure_step(batch: KVBatchMeta, *, cap: float | None) -> tuple[KVBatchMeta, StepTelemetry]:
    """cap: of a token's weight. Log-probs that are not finite are 0 in the batch afterwards, on both sides: the step is
    not learned from, but verl's advantages and metrics are computed all the same."""
    started = time.perf_counter()
    data = transfer_queue.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=[*_FIELDS, "uid"]
    )
    trainer, rollout, real, responses = (data[name].unbind() for name in _FIELDS)
    telemetry = measure_batch(
        trainer, rollout=rollout, real=real, responses=responses, prompts=list(data["uid"]), cap=cap
    )
    if telemetry.nonfinite_fraction:
        batch = _write_finite(batch, trainer, rollout)
    return batch, replace(telemetry, seconds=time.perf_counter() - started)


def _write_finite(batch: KVBatchMeta, trainer: tuple[Tensor, ...], rollout: tuple[Tensor, ...]) -> KVBatchMeta:
    pairs = [with_finite_pairs(one, other) for one, other in zip(trainer, rollout, strict=True)]
    columns = {name: [pair[place] for pair in pairs] for place, name in enumerate(_FIELDS[:2])}
    nested = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in columns.items()}
    fields = TensorDict(nested, batch_size=len(batch))
    return transfer_queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

"""The telemetry of one step of a run: from the TransferQueue, and back into it what must be finite there.

verl fetches log-probs, masks and responses of the batch as well, for an entropy, and adds `old_log_probs` to what it
got. To fetch them a second time takes ten times as long as to measure them, so `keeping_fetched` keeps verl's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import transfer_queue
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from appliance.errors import TrainingError
from appliance.trainer.telemetry import StepTelemetry, measure_batch, with_finite_pairs

_FIELDS = ("old_log_probs", "rollout_log_probs", "response_mask", "responses")


@dataclass
class Fetched:
    """What came out of the queue last, None where nothing did."""

    data: TensorDict | None = None


@contextlib.contextmanager
def keeping_fetched() -> Iterator[Fetched]:
    """As long as it is open, this process's client of the queue leaves what it fetched last."""
    client, fetched = transfer_queue.get_client(), Fetched()
    get = client.async_get_data

    async def get_and_keep(metadata: Any) -> TensorDict:
        fetched.data = await get(metadata)
        return fetched.data

    client.async_get_data = get_and_keep
    try:
        yield fetched
    finally:
        client.async_get_data = get


def measure_step(
    batch: KVBatchMeta, *, cap: float | None, fetched: TensorDict | None = None
) -> tuple[KVBatchMeta, StepTelemetry]:
    """cap: of a token's weight.  fetched: of this batch, fetched anew where a field is missing.

    Log-probs that are not finite are 0 in the batch afterwards, on both sides: the step is not learned from, but verl's
    advantages and metrics are computed all the same.  Raises TrainingError when rows differ in length.
    """
    started = time.perf_counter()
    if fetched is None or len(fetched) != len(batch) or not {*_FIELDS} <= {*fetched.keys()}:
        fetched = transfer_queue.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=list(_FIELDS)
        )
    offsets = fetched[_FIELDS[0]].offsets()
    if not all(torch.equal(fetched[name].offsets(), offsets) for name in _FIELDS):
        raise TrainingError("log-probs, masks and responses of this step have not the same lengths")
    trainer_N, rollout_N, real_N, responses_N = (fetched[name].values() for name in _FIELDS)
    telemetry = measure_batch(
        trainer_N,
        rollout_N=rollout_N,
        real_N=real_N,
        responses_N=responses_N,
        row_S=offsets.diff(),
        prompts=[key.rsplit("_", 2)[0] for key in batch.keys],  # verl's form: uid_session_index
        cap=cap,
    )
    if telemetry.nonfinite_fraction:
        batch = _write_finite(batch, fetched)
    return batch, replace(telemetry, seconds=time.perf_counter() - started)


def _write_finite(batch: KVBatchMeta, fetched: TensorDict) -> KVBatchMeta:
    both = (fetched[name] for name in _FIELDS[:2])
    pairs = [with_finite_pairs(one, other) for one, other in zip(*(rows.unbind() for rows in both), strict=True)]
    columns = {name: [pair[place] for pair in pairs] for place, name in enumerate(_FIELDS[:2])}
    nested = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in columns.items()}
    fields = TensorDict(nested, batch_size=len(batch))
    return transfer_queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

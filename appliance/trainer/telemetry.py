"""What a step's batch says beyond its means: mismatch by length, and prompts whose samples are all the same.

`metrics.jsonl` gets it under `mismatch_*` and `equal_group_fraction`, beside the contract's keys. It is read from the
TransferQueue, and what must be finite there is written back. verl fetches log-probs, masks and responses of the batch
as well, for an entropy, and adds `old_log_probs` to what it got. To fetch them a second time takes ten times as long as
to measure them, so `keeping_fetched` keeps verl's.

Legend: S sequences; N their response positions, sequence after sequence; T those of them that count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
import transfer_queue
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

from appliance.errors import TrainingError
from appliance.quant.mismatch import Mismatch, MismatchByLength, measure_by_length, measure_mismatch

_FIELDS = ("old_log_probs", "rollout_log_probs", "response_mask", "responses")


@dataclass(frozen=True)
class StepTelemetry:
    """equal_group_fraction: prompts of which every sample is the same sequence of tokens, 0..1.

    nonfinite_fraction: tokens of which a log-probability is not finite, 0..1. Where there are some, no number of
    `mismatch` is finite either, and in `by_length` they count as equal.  seconds: that measuring took.
    """

    mismatch: Mismatch
    by_length: MismatchByLength
    equal_group_fraction: float
    nonfinite_fraction: float = 0.0
    seconds: float = 0.0

    def metrics(self) -> dict[str, Any]:
        """JSON values. `mismatch_by_length`: an object per bucket, in the words of LengthBucket."""
        whole = self.by_length.whole
        return {
            "equal_group_fraction": self.equal_group_fraction,
            "nonfinite_fraction": self.nonfinite_fraction,
            "mismatch_chi2": whole.chi2,
            "mismatch_ppl_gap": whole.ppl_gap,
            "mismatch_largest_nats": whole.largest.nats,
            "mismatch_largest_sequence": whole.largest.sequence,
            "mismatch_largest_position": whole.largest.position,
            "mismatch_by_length": [dataclasses.asdict(bucket) for bucket in self.by_length.buckets],
        }


def measure_batch(
    trainer_N: Tensor,
    *,
    rollout_N: Tensor,
    real_N: Tensor,
    responses_N: Tensor,
    row_S: Tensor,
    prompts: Sequence[str],
    cap: float | None,
) -> StepTelemetry:
    """trainer_N, rollout_N: log-probabilities in nats.  real_N: the tokens that count.  responses_N: tokens.

    row_S: [S] int64, positions of each sequence, sum N.  prompts: the prompt's name per sequence.
    cap: of a token's weight, > 0.  A sequence without a token that counts is padding of the batch.  A token without two
    finite log-probs makes the whole mismatch not finite.
    """
    real_N = real_N.bool()
    trainer_T, rollout_T = trainer_N[real_N], rollout_N[real_N]
    broken = float((~finite_pairs(trainer_T, rollout_T)).double().mean())
    if broken:
        trainer_T, rollout_T = with_finite_pairs(trainer_T, rollout_T)
    length_S = torch.segment_reduce(real_N.double(), "sum", lengths=row_S).long()
    counted = length_S.bool().tolist()
    mismatch = measure_mismatch(trainer_T, rollout_T=rollout_T, cap=cap)
    return StepTelemetry(
        mismatch=Mismatch(**dict.fromkeys(dataclasses.asdict(mismatch), math.nan)) if broken else mismatch,
        by_length=measure_by_length(trainer_T, rollout_T=rollout_T, length_S=length_S, cap=cap),
        equal_group_fraction=equal_groups(
            compress(responses_N.split(row_S.tolist()), counted), prompts=compress(prompts, counted)
        ),
        nonfinite_fraction=broken,
    )


def finite_pairs(trainer: Tensor, rollout: Tensor) -> Tensor:
    """Where both log-probs are finite, and the weight that they make is. As measure_mismatch asks for it."""
    x = trainer.double() - rollout.double()
    return torch.isfinite(x) & torch.isfinite(x.exp())


def with_finite_pairs(trainer: Tensor, rollout: Tensor) -> tuple[Tensor, Tensor]:
    """Both at 0 nats where one of them is not finite: nothing may be learned from such a step, but its numbers must
    pass through what follows."""
    good = finite_pairs(trainer, rollout)
    return trainer.where(good, 0.0), rollout.where(good, 0.0)


def equal_groups(responses: Iterable[Tensor], *, prompts: Iterable[str]) -> float:
    """Share of prompts with more than one sample of which all are the same; 0 when there is no such prompt."""
    kinds: dict[str, set[bytes]] = defaultdict(set)
    samples: dict[str, int] = defaultdict(int)
    for prompt, response in zip(prompts, responses, strict=True):
        kinds[prompt].add(response.numpy().tobytes())
        samples[prompt] += 1
    groups = [prompt for prompt, count in samples.items() if count > 1]
    return sum(len(kinds[prompt]) == 1 for prompt in groups) / len(groups) if groups else 0.0


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

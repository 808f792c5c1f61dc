"""A step's numbers: what its batch says, and its line of `metrics.jsonl`, by the names of docs/metrics.md.

Beyond verl's metrics and timings it has the mismatch, by length of the response too (`mismatch_*`), and how many
prompts have samples that are all the same (`equal_group_fraction`). That is read from the TransferQueue, and what must
be finite there is written back. verl fetches log-probs, masks and responses of the batch as well, for an entropy, and
adds `old_log_probs` to what it got. To fetch them a second time takes ten times as long as to measure them, so
`keeping_fetched` keeps verl's.

Where a step's only update gives the old log-probs (`update` in the plan), they are written into the queue after it
(`write_old_log_probs`), and measured there. Where the rollouts' are the old ones (`rollout`) they equal themselves.
Compared with them are then those of the step's first update, whose weights are still those that sampled:
`measure_update`.

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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transfer_queue
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

from appliance.corrections.objective import KlPlace
from appliance.errors import TrainingError
from appliance.guard.policy import Action
from appliance.quant.mismatch import (
    DifferingToken,
    Mismatch,
    MismatchByLength,
    finite_pairs,
    measure_by_length,
    with_finite_pairs,
)
from appliance.record.events import METRICS_FILE, append_event, append_line
from appliance.record.plan import RunPlan
from appliance.sync.records import SyncRecord
from appliance.terms.settings import Dtype, OldLogProbs
from appliance.trainer.correction import centering_metrics, clipped_negative_fraction, mean_reference_kl, with_fields
from appliance.trainer.precision import Live
from appliance.trainer.top_words import DIVERGENCE
from appliance.trainer.update_log_probs import ForwardLogProbs, rows_by_key

RATE = "actor/lr"
_FROM_VERL = {
    "reward_mean": "critic/score/mean",  # without what a divergence takes off
    "response_tokens_mean": "response_length/mean",
    "clip_fraction": "actor/pg_clipfrac",
    "grad_norm": "actor/grad_norm",
    "entropy": "actor/entropy",
    "learning_rate": RATE,
}
SCALER_METRICS = ("grad_scale", "overflow_fraction")
_TIMINGS_S = {
    "rollout_s": "gen",
    "logprob_s": "old_log_prob",
    "update_s": "update_actor",
    "sync_s": "update_weights",
    "validate_s": "testing",
    "step_s": "step",
}
_FIELDS = ("old_log_probs", "rollout_log_probs", "response_mask", "responses")


@dataclass(frozen=True)
class Divergence:
    """Distance of the rollouts' distributions from the trainer's: corrections/distributions.py."""

    mean: float
    """Mean over tokens, nats; NaN where a log-prob is not finite."""
    equal_fraction: float
    """Share of the tokens at which the divergence is 0, 0..1."""

    @staticmethod
    def from_tokens(divergence_T: Tensor) -> Divergence:
        divergence_T = divergence_T.double()
        return Divergence(float(divergence_T.mean()), float((divergence_T == 0).double().mean()))

    def metrics(self) -> dict[str, float]:
        return {"mismatch_top_kl": self.mean, "mismatch_top_equal_fraction": self.equal_fraction}


@dataclass(frozen=True)
class StepTelemetry:
    """Measurements of a step's batch. With `measure_update` all fields but `equal_group_fraction` and `tokens_mean` are
    of that update's tokens."""

    mismatch: Mismatch
    by_length: MismatchByLength
    equal_group_fraction: float
    """Share of the prompts of which every sample is the same sequence of tokens, 0..1."""
    nonfinite_fraction: float = 0.0
    """Share of the tokens of which a log-probability is not finite or beyond FARTHEST, 0..1. Where there are some, no
    number of `mismatch` is finite, and in `by_length` they count as equal."""
    seconds: float = 0.0
    """Seconds that measuring took."""
    tokens_mean: float = 0.0
    """Mean number of a sequence's tokens that count."""
    differing_tokens: int = 0
    """Number of tokens whose two log-probs are not the same float32."""
    divergence: Divergence | None = None
    """Divergence of the distributions; None where engines report no words."""

    @property
    def differing_fraction(self) -> float:
        return self.differing_tokens / self.by_length.whole.num_tokens

    def metrics(self, *, is_exact: bool = False, cap: float | None = None) -> dict[str, Any]:
        """Return JSON values. `mismatch_by_length`: an object per bucket, in the words of LengthBucket.  is_exact:
        as StepParts.is_exact.  cap: where a token's weight is cut, None where it is not."""
        whole = self.by_length.whole
        return {
            "equal_group_fraction": self.equal_group_fraction,
            "nonfinite_fraction": self.nonfinite_fraction,
            "mismatch_equal_fraction": 1 - self.differing_fraction,
            **({"differing_tokens": self.differing_tokens} if is_exact else {}),
            **({} if cap is None else {"is_above_cap_fraction": self.mismatch.truncated_fraction}),
            "mismatch_chi2": whole.chi2,
            "mismatch_ppl_gap": whole.ppl_gap,
            **({} if self.divergence is None else self.divergence.metrics()),
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
    """Measure a batch. trainer_N, rollout_N: log-probabilities in nats.  real_N: the tokens that count.  responses_N:
    tokens.

    row_S: [S] int64, positions of each sequence, sum N.  prompts: the prompt's name per sequence.
    cap: of a token's weight, > 0.  A sequence without a token that counts is padding of the batch.  A token without two
    finite log-probs makes the whole mismatch not finite.
    """
    real_N = real_N.bool()
    length_S = torch.segment_reduce(real_N.double(), "sum", lengths=row_S).long()
    counted = length_S.bool().tolist()
    return StepTelemetry(
        **_compared(trainer_N[real_N], rollout_T=rollout_N[real_N], length_S=length_S, cap=cap),
        equal_group_fraction=equal_groups(
            compress(responses_N[real_N].split(length_S.tolist()), counted), prompts=compress(prompts, counted)
        ),
        tokens_mean=int(real_N.sum()) / max(1, sum(counted)),
    )


def _compared(trainer_T: Tensor, *, rollout_T: Tensor, length_S: Tensor, cap: float | None) -> dict[str, Any]:
    """Compute the part of StepTelemetry that says how far one is from the other."""
    differing = int((trainer_T.float() != rollout_T.float()).sum())
    broken = float((~finite_pairs(trainer_T, rollout_T)).double().mean())
    if broken:
        trainer_T, rollout_T = with_finite_pairs(trainer_T, rollout_T)
    by_length = measure_by_length(trainer_T, rollout_T=rollout_T, length_S=length_S, cap=cap)
    unknown = Mismatch(**{field.name: math.nan for field in dataclasses.fields(Mismatch)})
    return {
        "mismatch": unknown if broken else by_length.whole,
        "by_length": by_length,
        "nonfinite_fraction": broken,
        "differing_tokens": differing,
    }


def equal_groups(responses: Iterable[Tensor], *, prompts: Iterable[str]) -> float:
    """Return the share of prompts with more than one sample of which all are the same; 0 when there is no such
    prompt."""
    kinds: dict[str, set[bytes]] = defaultdict(set)
    samples: dict[str, int] = defaultdict(int)
    for prompt, response in zip(prompts, responses, strict=True):
        kinds[prompt].add(response.numpy().tobytes())
        samples[prompt] += 1
    groups = [prompt for prompt, count in samples.items() if count > 1]
    return sum(len(kinds[prompt]) == 1 for prompt in groups) / len(groups) if groups else 0.0


@contextlib.contextmanager
def keeping_fetched() -> Iterator[SimpleNamespace]:
    """Have this process's client of the queue leave what it fetched last in `data`, as long as this is open."""
    client, fetched = transfer_queue.get_client(), SimpleNamespace(data=None)
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
    """Measure a step. cap: of a token's weight.  fetched: fields of this batch, fetched again where one is missing.

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
    if DIVERGENCE in (batch.fields or ()):
        divergence_N = transfer_queue.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=[DIVERGENCE]
        )[DIVERGENCE].values()
        telemetry = replace(telemetry, divergence=Divergence.from_tokens(divergence_N[real_N.bool()]))
    return batch, replace(telemetry, seconds=time.perf_counter() - started)


def mean_entropy(batch: KVBatchMeta, *, fetched: TensorDict | None = None) -> float:
    """Return the mean over the batch's tokens, in nats, whatever the loss aggregates. To be called after a pass for
    log-probs, or after `write_old_log_probs`, which has fetched it."""
    names = ["entropy", "response_mask"]
    if fetched is None:
        fetched = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
    entropy_N, real_N = (fetched[name].values() for name in names)
    return float(entropy_N[real_N.bool()].double().mean())


def measure_update(
    step: StepTelemetry,
    *,
    keys: Sequence[str],
    fetched: TensorDict,
    forwards: Sequence[ForwardLogProbs],
    sequences: int,
    cap: float | None,
) -> tuple[StepTelemetry, float]:
    """Return (`step` with the mismatch of the first update's tokens, their mean entropy in nats).

    step: as `measure_step` says it.  keys: of its sequences.  fetched: what that was measured in.  forwards: of an
    update, of all ranks.  sequences: of that update.  cap: of a token's weight.
    Raises TrainingError as rows_by_key, and when a sequence's log-probs are not as many as its rollout's.
    """
    started = time.perf_counter()
    rows = rows_by_key(forwards, keys=keys, sequences=sequences)
    columns = (fetched[name].unbind() for name in ("rollout_log_probs", "response_mask"))
    length_S, of_sequences, divergences = [], [], list[Tensor]()
    for key, rollout, real in zip(keys, *columns, strict=True):
        length_S.append(int(real.sum()) if key in rows else 0)
        if key in rows:
            row = rows[key]
            if len(row.log_probs) != len(rollout):
                raise TrainingError("log-probs of this step's first update have not the rollouts' lengths")
            of_sequences.append([each[real.bool()] for each in (row.log_probs, rollout, row.entropy)])
            if row.divergence is not None:
                divergences.append(row.divergence[real.bool()])
    trainer_T, rollout_T, entropy_T = (torch.cat(each) for each in zip(*of_sequences, strict=True))
    compared = _compared(trainer_T, rollout_T=rollout_T, length_S=torch.tensor(length_S), cap=cap)
    compared["divergence"] = Divergence.from_tokens(torch.cat(divergences)) if divergences else None
    seconds = step.seconds + time.perf_counter() - started
    return replace(step, **compared, seconds=seconds), float(entropy_T.double().mean())


def write_old_log_probs(batch: KVBatchMeta, *, forwards: Sequence[ForwardLogProbs]) -> tuple[KVBatchMeta, TensorDict]:
    """Return (the batch with old log-probs and entropies as a pass would have left them, what verl fetches after a
    pass).

    forwards: of all ranks, of an update of the whole batch.  Raises TrainingError as rows_by_key.
    """
    rows = rows_by_key(forwards, keys=batch.keys, sequences=len(batch))
    log_probs, entropy, divergence = zip(*(rows[key] for key in batch.keys), strict=True)
    compared = {} if divergence[0] is None else {DIVERGENCE: divergence}
    batch = with_fields(batch, {"old_log_probs": log_probs, "entropy": entropy, **compared})
    names = [*_FIELDS, "entropy"]
    fetched = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
    return batch, fetched


def _write_finite(batch: KVBatchMeta, fetched: TensorDict) -> KVBatchMeta:
    both = (fetched[name] for name in _FIELDS[:2])
    pairs = [with_finite_pairs(one, other) for one, other in zip(*(rows.unbind() for rows in both), strict=True)]
    columns = {name: [pair[place] for pair in pairs] for place, name in enumerate(_FIELDS[:2])}
    return with_fields(batch, columns)


@dataclass
class StepParts:
    """Parts of a step that verl's hooks have brought so far, for its line of metrics."""

    rolled: Live
    """Precision that its rollouts are made in."""
    reward_failures: int = 0
    telemetry: StepTelemetry | None = None
    fetched: TensorDict | None = None
    """Fields that `telemetry` was measured in."""
    correction: dict[str, float | None] | None = None
    """Keys of BatchCorrection."""
    sync: SyncRecord | None = None
    """The weight update that ended it."""
    kv_scales: dict[str, float] = dataclasses.field(default_factory=dict)
    """Keys of KvScaleUpdates about that update; empty for a KV cache of 16 bits."""
    differing: DifferingToken | None = None
    """Token whose log-prob the update's forward did not give as the rollouts did, until a layer was searched for."""

    def is_exact(self, plan: RunPlan) -> bool:
        """Return whether the log-probs are to equal the rollouts' bit by bit: those in the planned precision. On a GPU
        nothing is promised but a bound (trainer/governor.py)."""
        return plan.trainer.one_flow and plan.is_cpu and self.rolled == Live(plan.rollout.label, plan.emulates)


def step_metrics(
    step: StepParts, *, verl: dict[str, Any], timing_s: dict[str, float], plan: RunPlan, number: int
) -> dict[str, Any]:
    """Return the keys of one step's line, by docs/metrics.md. Raises TrainingError when verl no longer reports one
    of them."""
    if step.telemetry is None or step.correction is None:
        raise TrainingError(f"step {number} ended without log-probabilities to compare")
    if step.sync is None:
        raise TrainingError(f"step {number} ended without a weight update")
    if missing := [name for name in _FROM_VERL.values() if name not in verl]:
        raise TrainingError(f"verl did not report {', '.join(missing)} in step {number}")
    # verl's length has the tools' tokens in it, which nobody generated
    length = step.telemetry.tokens_mean if plan.task.tools else float(verl["response_length/mean"])
    tokens = length * plan.batch.prompts_per_step * plan.rollout.samples_per_prompt
    mismatch, sync = step.telemetry.mismatch, step.sync.metrics()
    return {
        "step": number,
        **{key: float(verl[name]) for key, name in _FROM_VERL.items()},
        "clipped_negative_fraction": clipped_negative_fraction(verl),
        **_reference_kl(verl, plan=plan),
        **_scaled(verl, plan=plan),
        **centering_metrics(verl),
        "response_tokens_mean": length,
        **{key: round(timing_s[name], 4) for key, name in _TIMINGS_S.items() if name in timing_s},
        # Without a pass: what verl's timer has then is another fetch.
        **({} if plan.trainer.old_log_probs is OldLogProbs.RECOMPUTE else {"logprob_s": 0.0}),
        "rollout_tokens_per_s": tokens / timing_s["gen"],
        **sync,
        "telemetry_s": round(sync["telemetry_s"] + step.telemetry.seconds, 6),
        "mismatch_k3_kl": mismatch.k3_kl,
        "mismatch_kl": mismatch.kl,
        "probs_diff_mean": mismatch.probs_diff_mean,
        "probs_diff_max": mismatch.probs_diff_max,
        "is_weight_mean": mismatch.weight_mean,
        "is_weight_std": mismatch.weight_std,
        "is_weight_max": mismatch.weight_max,
        "is_ess": mismatch.ess,
        **step.correction,
    }


def _reference_kl(verl: dict[str, Any], *, plan: RunPlan) -> dict[str, float]:
    """Return `reference_kl`, nats, of a divergence in the loss: the estimator's mean over the tokens that were
    trained on."""
    return {"reference_kl": mean_reference_kl(verl)} if plan.algorithm.kl_place is KlPlace.LOSS else {}


def _scaled(verl: dict[str, Any], *, plan: RunPlan) -> dict[str, float]:
    """Return for a trainer in FP16 means over a step's updates: what the losses after each are multiplied by, and how
    many of them overflowed and were left out, 0..1."""
    names = SCALER_METRICS if plan.trainer.dtype is Dtype.FP16 else ()
    return {name: float(verl.get(f"actor/{name}", math.nan)) for name in names}


def metrics_left_out(run_dir: Path, *, telemetry: StepTelemetry, step: int) -> dict[str, float]:
    """Return what verl would report of an update that is not made, because log-probs of its step are not finite: NaN.
    An event reports it: nothing is left out silently."""
    share = telemetry.nonfinite_fraction
    what = f"step {step} is not learned from: log-probabilities of {share:.2%} of its tokens are not finite"
    append_event(run_dir, kind="note", what=what, why="an update with them would ruin the weights", step=step)
    return dict.fromkeys(
        (name for name in _FROM_VERL.values() if name.startswith("actor/") and name != "actor/entropy"), math.nan
    )


def tell_differing(run_dir: Path, *, telemetry: StepTelemetry, step: int) -> None:
    """Report at once, and with its place, that log-probs differ that must be equal; the ladder counts the step as
    bad."""
    whole = telemetry.by_length.whole
    append_event(
        run_dir,
        kind="guard",
        what=f"step {step}: {telemetry.differing_tokens} of {whole.num_tokens} log-probs are not the rollouts'",
        why=f"the largest difference is {whole.largest.nats:.4g} nats, at token {whole.largest.position} of sequence "
        f"{whole.largest.sequence}",
        step=step,
        action=str(Action.WARN),
    )


def append_metrics(run_dir: Path, line: dict[str, Any]) -> dict[str, Any]:
    """Append one line and return it as it is written: a value that is not finite becomes null."""
    written = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()
    }
    append_line(run_dir / METRICS_FILE, written)
    return written


def tracked_numbers(line: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a line by the names that they have in TensorBoard and the like: `appliance/reward_mean`."""
    return {f"appliance/{key}": float(value) for key, value in line.items() if _is_finite(value)}


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)

"""A run's correction on the driver: what each batch gets before the update, and that the loss used it.

Whatever the method, weights and mask, and bounds where it clips, are computed here in float64 and written into the
batch, rounded to float32; verl's own correction stays off. What was written is read back from the batch that goes to
the loss, and after the update the sums that the loss had in hand are held against it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transfer_queue
from omegaconf import DictConfig
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transfer_queue import KVBatchMeta
from verl.utils.config import omega_conf_to_dataclass

from appliance.corrections.base import ClipRange, Correction, Part, log_ratio
from appliance.errors import TrainingError
from appliance.record.plan import RunPlan
from appliance.trainer.corrected_loss import (
    CLIP_LOWER,
    CLIP_UPPER,
    KEPT,
    REAL,
    WEIGHTS,
    check_used,
    corrected_loss,
    sums_of,
)
from appliance.trainer.shadow_pass import LogProbs, ShadowPass

SEQUENCES_AT_ONCE = 64  # float64 copies of a batch of long sequences would not fit beside it

Rows = tuple[Tensor, ...]  # a row of tokens per sequence, without padding


@dataclass(frozen=True)
class Sequences:
    """What a correction is computed from, a row per sequence. real: before anything was dropped."""

    trainer: Rows
    rollout: Rows
    real: Rows
    advantages: Rows


@dataclass(frozen=True)
class CorrectedStep:
    """correction: as it was for this step.  fields: of the batch.  metrics: of the step's line."""

    correction: Correction
    fields: dict[str, Rows]
    metrics: dict[str, float | None]


class BatchCorrection:
    """Writes each step's correction into its batch, and follows it into the loss."""

    def __init__(self, plan: RunPlan) -> None:
        self._planned = plan.correction.resolved
        self._shadow = ShadowPass(plan) if self._planned.has_shadow_pass else None
        self._meant: dict[str, float] = {}
        self._metrics: dict[str, float | None] = {}

    @property
    def token_cap(self) -> float | None:
        """The plan's, of a token's weight: what the step's telemetry counts by."""
        return self._planned.token_cap

    def install(self, workers: Any, *, actor: DictConfig) -> None:
        """Give every training worker our loss. workers: verl's group of them.  actor: their configuration."""
        how = {"ratio_to": self._planned.ratio_to, "clips": self._planned.clips}
        workers.set_loss_fn(partial(corrected_loss, config=omega_conf_to_dataclass(actor), **how))

    def prepare(self, batch: KVBatchMeta, *, step: int, correction: Correction) -> KVBatchMeta:
        """The batch for the loss. correction: the plan's, as tight as it is now.

        Raises TrainingError when the batch does not carry what was written, NumericsError when a number that the
        correction needs is not finite.
        """
        fitted_at, fitted = self._shadow.last_fit(before=step) if self._shadow else (None, None)
        sequences = _read(batch)
        found = correct_step(sequences, correction=correction, fitted=fitted)
        batch = _write(batch, found.fields)
        check_written(batch, found)
        flat = {name: torch.cat(rows) for name, rows in ({REAL: sequences.real} | found.fields).items()}
        self._meant = sums_of(flat)
        self._metrics = found.metrics | ({"clip_fitted_step": fitted_at} if self._shadow else {})
        return batch

    def after_update(self, batch: KVBatchMeta, *, step: int, reported: dict[str, Any], log_probs: LogProbs) -> None:
        """Hold the loss to what was meant, and make the shadow pass, where this step has one.

        reported: verl's metrics of the update.  Raises TrainingError as check_used, NumericsError as ShadowPass.run.
        """
        check_used(reported, meant=self._meant)
        if self._shadow:
            self._shadow.run(batch, step=step, log_probs=log_probs)

    def metrics(self) -> dict[str, float | None]:
        """Of the line of the step that was prepared last."""
        return self._metrics


def correct_step(sequences: Sequences, *, correction: Correction, fitted: ClipRange | None = None) -> CorrectedStep:
    """fitted: as Correction.for_step.  Raises NumericsError when a number that the correction needs is not finite."""
    correction = correction.for_step(_parts(sequences), fitted=fitted)
    names = (KEPT, WEIGHTS, CLIP_LOWER, CLIP_UPPER) if correction.clips else (KEPT, WEIGHTS)
    fields: dict[str, list[Tensor]] = {name: [] for name in names}
    sums: Counter[str] = Counter()
    for part in _parts(sequences):
        found = correction.apply(part.x_BT, real_BT=part.real_BT)
        sums.update(correction.count(found, real_BT=part.real_BT))
        values = (found.kept_BT, found.weights_BT, found.lower_BT, found.upper_BT)
        done = len(fields[KEPT])
        for name, value_BT in zip(names, values, strict=False):
            for row, real in zip(value_BT, sequences.real[done : done + len(value_BT)], strict=True):
                fields[name].append(row[: len(real)].to(real.dtype if name == KEPT else torch.float32))
    rows = {name: tuple(each) for name, each in fields.items()}
    return CorrectedStep(correction, rows, correction.metrics(sums))


def check_written(batch: KVBatchMeta, step: CorrectedStep) -> None:
    """Raises TrainingError when the batch that goes to the loss does not carry the step's correction, bit for bit."""
    carries = set(step.fields) <= set(batch.fields or ())  # by this list the workers fetch
    if carries:
        found = _get(batch, list(step.fields))
        pairs = (zip(found[name].unbind(), rows, strict=True) for name, rows in step.fields.items())
        carries = all(torch.equal(one, other) for each in pairs for one, other in each)
    if not carries:
        raise TrainingError(
            f"the batch of this step does not carry what `{step.correction.name}` makes of its log-probs",
            hint="the correction did not reach the loss; report it with the log",
        )


def _parts(sequences: Sequences) -> Iterator[Part]:
    for start in range(0, len(sequences.real), SEQUENCES_AT_ONCE):
        trainer_BT, rollout_BT, real_BT, advantages_BT = (
            pad_sequence(list(rows[start : start + SEQUENCES_AT_ONCE]), batch_first=True)
            for rows in (sequences.trainer, sequences.rollout, sequences.real, sequences.advantages)
        )
        real_BT = real_BT.bool()
        yield Part(log_ratio(trainer_BT, rollout_BT=rollout_BT, real_BT=real_BT), real_BT, advantages_BT)


def _read(batch: KVBatchMeta) -> Sequences:
    names = ["old_log_probs", "rollout_log_probs", REAL, "advantages"]
    data = _get(batch, names)
    return Sequences(*(data[name].unbind() for name in names))


def _get(batch: KVBatchMeta, names: list[str]) -> TensorDict:
    return transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)


def _write(batch: KVBatchMeta, fields: dict[str, Rows]) -> KVBatchMeta:
    nested = {name: torch.nested.as_nested_tensor(list(rows), layout=torch.jagged) for name, rows in fields.items()}
    values = TensorDict(nested, batch_size=len(batch))
    return transfer_queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=values)

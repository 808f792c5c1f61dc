"""The clip bounds of a run with `calibrated-clipping`: refitted after some updates, written into every batch.

A run without it has a Clipping that does nothing. Each fit is a line of `clipping.jsonl`, from which another attempt
takes the bounds that held at its step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transfer_queue
from omegaconf import DictConfig
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.padding import response_from_nested

from appliance.errors import TrainingError
from appliance.plan.model import CorrectionPlan, RunPlan
from appliance.quant.correction import ClipRange, CorrectionMethod
from appliance.run.checkpoints import FITS_FILE
from appliance.run.events import append_event, append_line
from appliance.trainer.bounded_loss import CLIP_RANGE, bounded_loss
from appliance.trainer.calibrated import USED_HIGH, USED_LOW, Fit, fit_bounds, within_cap

_REPORTED_WITHIN = 1e-6  # the loss's metric is a mean over micro-batches of one number

LogProbs = Callable[[KVBatchMeta], Any]  # writes `log_probs` of a batch into the queue


class Clipping:
    """One run's bounds. `bounds` are those of the step that runs, None with another method."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._run_dir = Path(plan.run_dir)
        self._is_on = plan.correction.method is CorrectionMethod.CALIBRATED_CLIPPING
        self.bounds: ClipRange | None = None
        self.fitted_at: int | None = None

    def install(self, workers: Any, *, actor: DictConfig) -> None:
        """Give every training worker our loss. workers: verl's group of them.  actor: their configuration."""
        if self._is_on:
            workers.set_loss_fn(partial(bounded_loss, config=omega_conf_to_dataclass(actor)))

    def write(self, batch: KVBatchMeta, *, step: int, correction: CorrectionPlan) -> KVBatchMeta:
        """The batch with the bounds of this step. correction: the plan's, as tight as it is now."""
        if not self._is_on:
            return batch
        fits = [fit for fit in read_fits(self._run_dir / FITS_FILE) if fit[0] < step]
        self.fitted_at, fitted = fits[-1] if fits else (None, correction.nominal)
        assert correction.cap is not None, "calibrated clipping has a cap"
        self.bounds = within_cap(fitted, nominal=correction.nominal, cap=correction.cap)
        rows = torch.tensor([[self.bounds.low, self.bounds.high]], dtype=torch.float64).expand(len(batch), 2)
        fields = TensorDict({CLIP_RANGE: rows.contiguous()}, batch_size=len(batch))
        return transfer_queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def after_update(
        self, batch: KVBatchMeta, *, step: int, reported: dict[str, Any], temperature: float, log_probs: LogProbs
    ) -> None:
        """The shadow pass, when this step has one. reported: verl's metrics of the update.

        Raises TrainingError when the loss did not use the bounds, NumericsError when a log-prob is not finite.
        """
        if not self._is_on or self.bounds is None:
            return
        check_used(reported, bounds=self.bounds)
        shadow = self._plan.correction.shadow
        assert shadow is not None, "the plan of calibrated clipping has a shadow pass"
        if (step - 1) % shadow.every:
            return
        part = shadow_batch(batch, sequences=shadow.sequences)
        part.extra_info = {
            "calculate_entropy": False,
            "compute_loss": False,
            "temperature": temperature,
            "micro_batch_size_per_gpu": shadow.micro_batch_sequences,
        }
        log_probs(part)
        full_T, rollout_T = _ratios(part)
        if len(full_T):
            self._keep(fit_bounds(full_T, rollout_T=rollout_T, nominal=self._plan.correction.nominal), step=step)

    def _keep(self, fit: Fit, *, step: int) -> None:
        line = {"step": step, "low": fit.bounds.low, "high": fit.bounds.high}
        numbers = {"tokens": fit.tokens, "above": fit.above, "below": fit.below}
        unfitted = {"unfitted_above": fit.unfitted_above, "unfitted_below": fit.unfitted_below}
        append_line(self._run_dir / FITS_FILE, {**line, **numbers, **unfitted})
        what = f"clip bounds refitted to {1 - fit.bounds.low:.4g}..{1 + fit.bounds.high:.4g} after step {step}"
        append_event(self._run_dir, kind="clipping", what=what, why=f"a shadow pass over {fit.tokens} tokens")

    def metrics(self) -> dict[str, float | None]:
        """`clip_bound_*`: of the ratio, in the step that ended.  `clip_fitted_step`: null before the first fit."""
        if self.bounds is None:
            return {}
        low, high = 1 - self.bounds.low, 1 + self.bounds.high
        return {"clip_bound_low": low, "clip_bound_high": high, "clip_fitted_step": self.fitted_at}


def read_fits(path: Path) -> list[tuple[int, ClipRange]]:
    """(step after whose update, bounds) in the order in which they were written."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [(raw["step"], ClipRange(raw["low"], raw["high"])) for raw in map(json.loads, lines)]


def shadow_batch(batch: KVBatchMeta, *, sequences: int) -> KVBatchMeta:
    """So many of the batch's sequences, spread evenly over it; rows that only pad the batch are left out."""
    real = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    return batch.select_keys([real[index * len(real) // sequences] for index in range(sequences)])


def check_used(reported: dict[str, Any], *, bounds: ClipRange) -> None:
    """Raises TrainingError when the loss did not report these bounds."""
    used = (reported.get(USED_LOW), reported.get(USED_HIGH))
    meant = (bounds.low, bounds.high)
    if None in used or not all(math.isclose(float(a), b, rel_tol=_REPORTED_WITHIN) for a, b in zip(used, meant)):  # noqa: B905
        raise TrainingError(
            f"the loss clipped within {used}, and {meant} was meant", hint="the correction did not reach the loss"
        )


def _ratios(batch: KVBatchMeta) -> tuple[Tensor, Tensor]:
    """(log R, log B) of the batch's tokens, float64."""
    fields = ["log_probs", "old_log_probs", "rollout_log_probs", "response_mask"]
    data = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    new, real = response_from_nested(data["log_probs"], data["response_mask"]).values(), data["response_mask"].values()
    old, rollout = data["old_log_probs"].values(), data["rollout_log_probs"].values()
    mask = real.bool()
    return (new.double() - old.double())[mask], (new.double() - rollout.double())[mask]

"""The shadow pass of calibrated clipping: after some updates, the new policy's log-probs in full precision.

Each fit is a line of `clipping.jsonl`, from which another attempt takes the bounds that held at its step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transfer_queue
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.workers.utils.padding import response_from_nested

from appliance.corrections.base import ClipRange
from appliance.corrections.calibrated import Fit, fit_bounds
from appliance.record.checkpoints import FITS_FILE
from appliance.record.events import append_event, append_line
from appliance.record.plan import RunPlan

LogProbs = Callable[[KVBatchMeta], Any]  # writes `log_probs` of a batch into the queue


class ShadowPass:
    """Of one run whose correction has one."""

    def __init__(self, plan: RunPlan) -> None:
        assert plan.correction.shadow is not None, "the plan of such a correction has a shadow pass"
        self._shadow = plan.correction.shadow
        self._nominal = plan.correction.resolved.clip
        self._temperature = plan.rollout.temperature
        self._run_dir = Path(plan.run_dir)

    def last_fit(self, *, before: int) -> tuple[int | None, ClipRange | None]:
        """(step after whose update it was made, range), both None before the first."""
        fits = [fit for fit in read_fits(self._run_dir / FITS_FILE) if fit[0] < before]
        return fits[-1] if fits else (None, None)

    def run(self, batch: KVBatchMeta, *, step: int, log_probs: LogProbs) -> None:
        """When it is due after this step's update. Raises NumericsError when a log-prob is not finite."""
        if (step - 1) % self._shadow.every:
            return
        part = shadow_batch(batch, sequences=self._shadow.sequences)
        part.extra_info = {
            "calculate_entropy": False,
            "compute_loss": False,
            "temperature": self._temperature,
            "micro_batch_size_per_gpu": self._shadow.micro_batch_sequences,
        }
        log_probs(part)
        full_T, rollout_T = _ratios(part)
        if len(full_T):
            self._keep(fit_bounds(full_T, rollout_T=rollout_T, nominal=self._nominal), step=step)

    def _keep(self, fit: Fit, *, step: int) -> None:
        line = {"step": step, "low": fit.bounds.low, "high": fit.bounds.high}
        numbers = {"tokens": fit.tokens, "above": fit.above, "below": fit.below}
        unfitted = {"unfitted_above": fit.unfitted_above, "unfitted_below": fit.unfitted_below}
        append_line(self._run_dir / FITS_FILE, {**line, **numbers, **unfitted})
        what = f"clip bounds refitted to {1 - fit.bounds.low:.4g}..{1 + fit.bounds.high:.4g} after step {step}"
        append_event(self._run_dir, kind="clipping", what=what, why=f"a shadow pass over {fit.tokens} tokens")


def read_fits(path: Path) -> list[tuple[int, ClipRange]]:
    """(step after whose update, bounds) in the order in which they were written."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [(raw["step"], ClipRange(raw["low"], raw["high"])) for raw in map(json.loads, lines)]


def shadow_batch(batch: KVBatchMeta, *, sequences: int) -> KVBatchMeta:
    """So many of the batch's sequences, spread evenly over it; rows that only pad the batch are left out."""
    real = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    return batch.select_keys([real[index * len(real) // sequences] for index in range(sequences)])


def _ratios(batch: KVBatchMeta) -> tuple[Tensor, Tensor]:
    """(log R, log B) of the batch's tokens, float64."""
    fields = ["log_probs", "old_log_probs", "rollout_log_probs", "response_mask"]
    data = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    new, real = response_from_nested(data["log_probs"], data["response_mask"]).values(), data["response_mask"].values()
    old, rollout = data["old_log_probs"].values(), data["rollout_log_probs"].values()
    mask = real.bool()
    return (new.double() - old.double())[mask], (new.double() - rollout.double())[mask]

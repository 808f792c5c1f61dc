"""One line of `metrics.jsonl` per step, by the contract's names, from verl's metrics and timings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.errors import TrainingError
from appliance.record.events import METRICS_FILE, append_event, append_line
from appliance.record.plan import RunPlan
from appliance.sync.records import SyncRecord
from appliance.trainer.precision import Live
from appliance.trainer.telemetry import StepTelemetry

_FROM_VERL = {
    "reward_mean": "critic/rewards/mean",
    "response_tokens_mean": "response_length/mean",
    "clip_fraction": "actor/pg_clipfrac",
    "grad_norm": "actor/grad_norm",
    "entropy": "actor/entropy",
    "learning_rate": "actor/lr",
}
_TIMINGS_S = {
    "rollout_s": "gen",
    "logprob_s": "old_log_prob",
    "update_s": "update_actor",
    "sync_s": "update_weights",
    "save_s": "save_checkpoint",
    "validate_s": "testing",
    "step_s": "step",
}


@dataclass
class Step:
    """What a step has brought so far, from the hooks of verl's, for its line."""

    rolled: Live
    """What its rollouts are made in."""

    reward_failures: int = 0
    telemetry: StepTelemetry | None = None

    correction: dict[str, float | None] | None = None
    """Of BatchCorrection, which wrote what went to the loss."""

    sync: SyncRecord | None = None
    """The weight update that ended it. Its telemetry is null where no rollout is quantised."""


def step_metrics(
    step: Step, *, verl: dict[str, Any], timing_s: dict[str, float], plan: RunPlan, number: int
) -> dict[str, Any]:
    """The contract's keys for one step. Raises TrainingError when verl no longer reports one that we promise."""
    if step.telemetry is None or step.correction is None:
        raise TrainingError(f"step {number} ended without log-probabilities to compare")
    if step.sync is None:
        raise TrainingError(f"step {number} ended without a weight update")
    missing = [name for name in _FROM_VERL.values() if name not in verl]
    if missing:
        raise TrainingError(f"verl did not report {', '.join(missing)} in step {number}")
    tokens = float(verl["response_length/mean"]) * plan.prompts_per_step * plan.rollout.samples_per_prompt
    mismatch, sync = step.telemetry.mismatch, step.sync.metrics()
    return {
        "step": number,
        **{key: float(verl[name]) for key, name in _FROM_VERL.items()},
        **{key: round(timing_s[name], 4) for key, name in _TIMINGS_S.items() if name in timing_s},
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


def left_out(run_dir: Path, *, telemetry: StepTelemetry, step: int) -> dict[str, float]:
    """What verl would report of an update that is not made, because log-probs of its step are not finite: NaN. Said as
    an event: nothing is left out silently."""
    share = telemetry.nonfinite_fraction
    what = f"step {step} is not learned from: log-probabilities of {share:.2%} of its tokens are not finite"
    append_event(run_dir, kind="note", what=what, why="an update with them would ruin the weights", step=step)
    return dict.fromkeys(
        (name for name in _FROM_VERL.values() if name.startswith("actor/") and name != "actor/entropy"), math.nan
    )


def append_metrics(run_dir: Path, line: dict[str, Any]) -> dict[str, Any]:
    """Append one line and return it as it is written: a value that is not finite becomes null."""
    written = {key: None if _is_not_finite(value) else value for key, value in line.items()}
    append_line(run_dir / METRICS_FILE, written)
    return written


def tracked(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line under the names that they have in TensorBoard and the like: `appliance/reward_mean`."""
    numbers = {key: value for key, value in line.items() if isinstance(value, int | float)}
    return {f"appliance/{key}": float(value) for key, value in numbers.items() if not _is_not_finite(value)}


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)

"""verl's own PPO loss, of what the driver wrote into the batch: weights, the tokens that stay, bounds of the ratio.

verl hands a policy loss a frozen configuration and a fixed list of tensors; what a correction decides from step to step
has no way in. But which function a worker calls as its loss is set by a call of verl's (`set_loss_fn`), and that
function gets the whole micro-batch. Ours takes out of it which policy the ratio is to and, of a method that clips by
itself, the two bounds of each token, puts them where verl's loss looks for its own, and calls verl's. Weights and mask
verl's loss finds by their names. Dual clip, aggregation and metrics are verl's, and so is every operation.

The fields travel with their batch: mini-batches, micro-batches and ranks share them by themselves, no worker has a
state that a restart could lose. What the loss had in hand comes back as sums among verl's metrics, and the driver holds
them against what it meant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss

from appliance.errors import NumericsError, TrainingError

REAL, KEPT, WEIGHTS = "loss_mask", "response_mask", "rollout_is_weights"  # verl's names; the first is never changed
CLIP_LOWER, CLIP_UPPER = "clip_lower", "clip_upper"  # float32, the bounds themselves
USED = "actor/correction_"  # nothing with `max` or `min` in it: verl would not take the mean over mini-batches
_AGREE_WITHIN = 1e-9  # float64 sums in another order


def corrected_loss(
    config: ActorConfig,
    model_output: dict[str, Tensor],
    data: TensorDict,
    dp_group: Any = None,
    *,
    ratio_to: str = "old_log_probs",
    clips: bool = False,
) -> tuple[Tensor, dict[str, Metric]]:
    """verl's signature of a loss, and as Correction has them: ratio_to, clips.

    Raises TrainingError for a batch that lacks what this loss reads, NumericsError when a number there is not finite.
    """
    bounds = (CLIP_LOWER, CLIP_UPPER) if clips else ()
    reads = (WEIGHTS, ratio_to, *bounds)
    if missing := [name for name in (REAL, *reads) if name not in data.keys()]:  # noqa: SIM118
        raise TrainingError(f"the loss got a batch without {', '.join(missing)}", hint="report it with the log")
    for name in reads:
        if not bool(torch.isfinite(_flat(data[name])).all()):
            raise NumericsError(f"a number in {name} of this step is not finite")
    used = sums_of({name: _flat(data[name]) for name in (REAL, KEPT, WEIGHTS, *bounds)})
    data = data.clone(recurse=False)
    data["old_log_probs"] = data[ratio_to]
    if clips:  # verl's loss takes a tensor as it takes a number
        padded = data.select(*bounds).to_padded_tensor()
        config = replace(config, **_as_offsets(padded[CLIP_LOWER], upper_BT=padded[CLIP_UPPER]))
    loss, metrics = ppo_loss(config, model_output, data, dp_group)
    used = {f"{USED}{name}": value for name, value in used.items()}
    return loss, {**metrics, **Metric.from_dict(used, aggregation=AggregationType.SUM)}


def _as_offsets(lower_BT: Tensor, *, upper_BT: Tensor) -> dict[str, Tensor]:
    """So that verl's `1 - low` and `1 + high` are the bounds again: exactly from 0.5 on, below it to 2^-25."""
    return {"clip_ratio_low": 1 - lower_BT, "clip_ratio_high": upper_BT - 1}


def sums_of(fields: Mapping[str, Tensor]) -> dict[str, float]:
    """Over the tokens that stay, by the names of the fields; `tokens`: before any was dropped. [N] each."""
    kept_N = fields[KEPT].bool()
    counts = {"tokens": float(fields[REAL].sum()), "kept": float(kept_N.sum())}
    others = {name: fields[name] for name in (WEIGHTS, CLIP_LOWER, CLIP_UPPER) if name in fields}
    return counts | {name: float(values_N[kept_N].double().sum()) for name, values_N in others.items()}


def check_used(reported: Mapping[str, Any], *, meant: Mapping[str, float]) -> None:
    """Raises TrainingError when the loss did not use what was meant, a sum of `sums_of` for a sum of `sums_of`.

    reported: verl's metrics of an update, where each is divided by the same number of mini-batches and ranks.
    """
    for name, value in meant.items():
        used, tokens = (float(reported.get(f"{USED}{each}", math.nan)) for each in (name, "tokens"))
        if not (tokens > 0 and math.isclose(used * meant["tokens"], value * tokens, rel_tol=_AGREE_WITHIN)):
            message = f"the loss used {name} {used:.10g} of {tokens:.10g} tokens, and {value:.10g} of"
            hint = "the correction did not reach the loss; report it with the log"
            raise TrainingError(f"{message} {meant['tokens']:.10g} was meant", hint=hint)


def _flat(values: Tensor) -> Tensor:
    return values.values() if values.is_nested else values

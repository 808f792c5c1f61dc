"""verl's own PPO loss, in the ratio to the policy that sampled, between the bounds that the batch carries.

verl hands a policy loss a frozen configuration and a fixed list of tensors; a bound that moves from step to step has
no way in. But which function a worker calls as its loss is set by a call of verl's (`set_loss_fn`), and that function
gets the whole micro-batch. Ours takes two things out of it, and calls verl's: the clip range of this step, a field that
the driver writes, in place of the configuration's; the rollout's log-probs in place of the trainer's. Everything else
(dual clip, aggregation, its metrics) is verl's.

The field travels with its batch: mini-batches, micro-batches and ranks share it by themselves, no worker has a state
that a restart could lose, and the driver can look at what it sent. What the loss used comes back as a metric.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss

from appliance.errors import NumericsError, TrainingError
from appliance.trainer.calibrated import USED_HIGH, USED_LOW

CLIP_RANGE = "clip_range"  # [B, 2] float64, (low, high), the same in every row


def bounded_loss(
    config: ActorConfig, model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None
) -> tuple[Tensor, dict[str, Metric]]:
    """verl's signature of a loss. Raises TrainingError for a batch that lacks what this loss reads, NumericsError when
    a log-prob of the rollouts is not finite."""
    missing = [name for name in (CLIP_RANGE, "rollout_log_probs") if name not in data.keys()]  # noqa: SIM118
    if missing:
        raise TrainingError(f"`calibrated-clipping` got a batch without {', '.join(missing)}")
    ranges = data[CLIP_RANGE]
    ranges_B2 = (ranges.values() if ranges.is_nested else ranges).view(-1, 2)  # verl's queue makes every field nested
    low, high = ranges_B2[0].tolist()
    if not bool((ranges_B2 == ranges_B2[0]).all()):
        raise TrainingError("the clip range of a micro-batch is not the same in every row")
    rollout = data["rollout_log_probs"]
    if not bool(torch.isfinite(rollout.values() if rollout.is_nested else rollout).all()):
        raise NumericsError("a log-probability of this step's rollouts is not finite")
    bounded = replace(config, clip_ratio_low=low, clip_ratio_high=high)
    data = data.clone(recurse=False)
    data["old_log_probs"] = rollout
    loss, metrics = ppo_loss(bounded, model_output, data, dp_group)
    used = {USED_LOW: low, USED_HIGH: high}
    return loss, {**metrics, **Metric.from_dict(used, aggregation=AggregationType.MEAN)}

"""ACR, adaptive clipping range, as a policy loss of verl's.

R = p_theta / p_trainer of a token, w = p_trainer / p_rollout, A its advantage, C the cap, e the clip range. To truncate
w at C is to replace p_rollout by max(p_rollout, p_trainer / C); with r = min(1, C / w) the objective is

    min(w, C) * min(R * A, clip(R, 1 - e_low, (1 + e_high) / r) * A)

Only the upper bound moves, only on truncated tokens, and with no truncated token this is verl's own clipped loss with
truncated importance sampling, to the last bit: dual clip, weights and aggregation are done by the same operations in
the same order. Where the source leaves room: a negative advantage keeps verl's dual clip, which the source does not
mention, and the lower bound stays.

verl hands a loss only weights that it has truncated itself. The plan therefore gives it a threshold that nothing
reaches (plan/verl_args.py), and the cap comes from the run's plan.

Legend: B sequences of a micro-batch, T tokens, padded.  Source: QuRL, arXiv 2602.13953.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
import verl.utils.torch_functional as verl_F
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.workers.config import ActorConfig

from appliance.errors import NumericsError, TrainingError
from appliance.plan.env import PLAN_VARIABLE
from appliance.plan.read import read_plan
from appliance.trainer.corrections import upper_clip


@functools.cache
def _cap() -> float:
    correction = read_plan(Path(os.environ[PLAN_VARIABLE])).correction
    if correction.cap is None:
        raise TrainingError(f"the plan's correction `{correction.method}` has no cap, and its loss was called")
    return correction.cap


@register_policy_loss("appliance-acr")  # the name that plan/verl_args.py gives verl
def acr_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """verl's signature of a policy loss. All tensors [B, T]; rollout_is_weights before truncation, 0 at padding.

    Raises TrainingError when the batch has no weights, NumericsError when one is not finite.
    """
    if config is None or rollout_is_weights is None:
        raise TrainingError("`acr` got a batch without importance weights", hint="report it with the log")
    return acr_loss(
        old_log_prob,
        log_prob_BT=log_prob,
        advantages_BT=advantages,
        mask_BT=response_mask,
        raw_BT=rollout_is_weights,
        cap=_cap(),
        config=config,
        loss_agg_mode=loss_agg_mode,
    )


def acr_loss(
    old_log_prob_BT: Tensor,
    *,
    log_prob_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    raw_BT: Tensor,
    cap: float,
    config: ActorConfig,
    loss_agg_mode: str,
) -> tuple[Tensor, dict[str, float]]:
    """(scalar loss, verl's metrics of this micro-batch). raw_BT: w before truncation.  cap: > 0.

    Raises NumericsError when a weight is not finite.
    """
    if not bool(torch.isfinite(raw_BT).all()):
        raise NumericsError("an importance weight of this step is not finite")
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    raw_BT = raw_BT.detach()
    upper_BT = upper_clip(raw_BT, cap=cap, clip_high=high)

    log_ratio_BT = torch.clamp(log_prob_BT - old_log_prob_BT, min=-20.0, max=20.0)
    ratio_BT = torch.exp(log_ratio_BT)
    plain_BT = -advantages_BT * ratio_BT
    # clamp, not minimum: at a tie clamp passes the whole gradient, as verl's does
    clipped_BT = -advantages_BT * torch.clamp(ratio_BT, torch.full_like(ratio_BT, 1 - low), upper_BT)
    worse_BT = torch.maximum(plain_BT, clipped_BT)
    dual_BT = -advantages_BT * config.clip_ratio_c
    losses_BT = torch.where(advantages_BT < 0, torch.min(dual_BT, worse_BT), worse_BT)
    losses_BT = losses_BT * raw_BT.clamp(max=cap)

    loss = agg_loss(loss_mat=losses_BT, loss_mask=mask_BT, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    lower_BT = torch.gt(worse_BT, dual_BT) * (advantages_BT < 0).float()
    return loss, {
        "actor/pg_clipfrac": verl_F.masked_mean(torch.gt(clipped_BT, plain_BT).float(), mask_BT).item(),
        "actor/ppo_kl": verl_F.masked_mean(-log_ratio_BT, mask_BT).detach().item(),
        "actor/pg_clipfrac_lower": verl_F.masked_mean(lower_BT, mask_BT).item(),
        "actor/acr_widened_fraction": verl_F.masked_mean((raw_BT > cap).float(), mask_BT).item(),
    }

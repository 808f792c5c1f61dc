"""Off-policy corrections as pure functions of log-probabilities: what verl is expected to do to a batch.

Legend: B sequences, T tokens of the longest response, padded. mask_BT is true for a real token.
    x_BT = log p_trainer - log p_rollout     nats, 0 at padding
    w_BT = exp(x)                            importance weight; x is clamped to -20..20 first, as verl does

All of it is detached: a weight changes the measure, never the objective. Everything is computed in float64; verl does
the same in float32, so `margin` tells how near a decision was.

verl divides the sum of losses by the tokens of the batch, dropped ones included: dropping makes a step smaller, not
louder. Its group advantages also still count dropped sequences.

Sources: Yao et al. 2025; verl 0.9.1, trainer/ppo/rollout_corr_helper.py; arXiv 2602.13953 (ACR).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from appliance.errors import NumericsError
from appliance.plan.model import CorrectionPlan
from appliance.quant.correction import ClipRange, CorrectionMethod
from appliance.trainer.calibrated import outside

CLAMP = 20.0  # nats
# float32 sums of T terms in blocks: at most 64 roundings of partial sums, each 2^-24 of at most 1 + sum |x|.
FLOAT32_SLACK = 64 * 2.0**-24


@dataclass(frozen=True)
class Corrected:
    """What a correction makes of a batch.

    weights_BT: what each loss is multiplied by, 0 at padding; None where the method only drops.  For `acr` before
    truncation: its loss truncates.  kept_BT: real tokens that stay.  acted_BT: real tokens that were cut, weighed 0 or
    dropped.  margin_BT: distance of what was compared from the nearer limit, in units of FLOAT32_SLACK's bound;
    infinite where no decision was taken.
    """

    weights_BT: Tensor | None
    kept_BT: Tensor
    acted_BT: Tensor
    margin_BT: Tensor


def log_ratio(trainer_BT: Tensor, *, rollout_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """x_BT in float64, detached, 0 at padding. Raises NumericsError when a real token's log-prob is not finite."""
    x_BT = trainer_BT.detach().double() - rollout_BT.detach().double()
    if not bool(torch.isfinite(x_BT[mask_BT.bool()]).all()):
        raise NumericsError("a log-probability of this step's rollouts is not finite")
    return x_BT.masked_fill(~mask_BT.bool(), 0.0)


def token_weights(x_BT: Tensor, *, mask_BT: Tensor, cap: float | None = None) -> Tensor:
    """min(w, cap), 0 at padding; in (0, cap] elsewhere. cap None: not truncated."""
    w_BT = x_BT.detach().clamp(-CLAMP, CLAMP).exp().masked_fill(~mask_BT.bool(), 0.0)
    return w_BT if cap is None else w_BT.clamp(max=cap)


def sequence_weights(x_BT: Tensor, *, mask_BT: Tensor, cap: float | None = None) -> Tensor:
    """min(product of a sequence's w, cap) at each of its tokens, 0 at padding."""
    product_BT = x_BT.detach().sum(dim=-1, keepdim=True).clamp(-CLAMP, CLAMP).exp().expand_as(x_BT)
    product_BT = product_BT.masked_fill(~mask_BT.bool(), 0.0)
    return product_BT if cap is None else product_BT.clamp(max=cap)


def log_product(x_BT: Tensor) -> Tensor:
    """[B] log of the product of a sequence's weights, each clamped."""
    return x_BT.detach().clamp(-CLAMP, CLAMP).sum(dim=-1)


def log_geometric_mean(x_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """[B] log of the geometric mean of a sequence's weights, each clamped; 0 for a sequence without tokens."""
    return log_product(x_BT) / mask_BT.sum(dim=-1).clamp(min=1)


def mean_k3(x_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """[B] mean of exp(x) - 1 - x over a sequence's tokens, nats; 0 for a sequence without tokens."""
    x_BT = x_BT.detach().clamp(-CLAMP, CLAMP)
    return (torch.expm1(x_BT) - x_BT).sum(dim=-1) / mask_BT.sum(dim=-1).clamp(min=1)


def mixed_weights(x_BT: Tensor, *, mask_BT: Tensor, cap: float, share: float) -> Tensor:
    """1 + share * (min(w, cap) - 1), 0 at padding, elsewhere in (0, max(1, cap)]. share: 0..1, trainer/adaptive.py."""
    cut_BT = token_weights(x_BT, mask_BT=mask_BT, cap=cap)
    return (1 + share * (cut_BT - 1)).masked_fill(~mask_BT.bool(), 0.0)


def correct(
    x_BT: Tensor,
    *,
    mask_BT: Tensor,
    plan: CorrectionPlan,
    share: float | None = None,
    clip: ClipRange | None = None,
) -> Corrected:
    """What the plan's method makes of a batch. x_BT: from `log_ratio`.  share: of `adaptive` only.

    clip: of `calibrated-clipping` only, the bounds of this step; None: the recipe's.
    """
    found = _by_method(x_BT, mask_BT=mask_BT, plan=plan, share=share, clip=clip)
    if plan.reject_k3_above is None:
        return found
    drops = plan.replace(method=CorrectionMethod.K3_REJECT, cap=plan.reject_k3_above)
    dropped = _by_method(x_BT, mask_BT=mask_BT, plan=drops, share=None, clip=None)
    return Corrected(
        found.weights_BT,
        found.kept_BT & dropped.kept_BT,
        found.acted_BT | dropped.acted_BT,
        torch.minimum(found.margin_BT, dropped.margin_BT),
    )


def _by_method(
    x_BT: Tensor, *, mask_BT: Tensor, plan: CorrectionPlan, share: float | None, clip: ClipRange | None
) -> Corrected:
    real_BT = mask_BT.bool()
    match plan.method:
        case CorrectionMethod.NONE:
            return _weighed(None, raw_BT=torch.zeros_like(x_BT), real_BT=real_BT, cap=None)
        case CorrectionMethod.TIS | CorrectionMethod.ACR:
            raw_BT = token_weights(x_BT, mask_BT=real_BT)
            used_BT = (
                _for_loss(raw_BT, plan=plan) if plan.method is CorrectionMethod.ACR else raw_BT.clamp(max=plan.cap)
            )
            return _weighed(used_BT, raw_BT=raw_BT, real_BT=real_BT, cap=plan.cap)
        case CorrectionMethod.ADAPTIVE:
            if share is None or plan.cap is None:
                raise ValueError("`adaptive` needs a cap and a share")
            raw_BT = token_weights(x_BT, mask_BT=real_BT)
            used_BT = mixed_weights(x_BT, mask_BT=real_BT, cap=plan.cap, share=share)
            return _weighed(used_BT, raw_BT=raw_BT, real_BT=real_BT, cap=plan.cap)
        case CorrectionMethod.CALIBRATED_CLIPPING:  # clipped for the quantisation alone: p_theta is p_trainer still
            clipped_BT = outside(x_BT, bounds=clip or plan.nominal) & real_BT
            return Corrected(None, real_BT, clipped_BT, torch.full_like(x_BT, torch.inf))
        case CorrectionMethod.TIS_SEQUENCE:
            raw_BT = sequence_weights(x_BT, mask_BT=real_BT)
            return _weighed(raw_BT.clamp(max=plan.cap), raw_BT=raw_BT, real_BT=real_BT, cap=plan.cap)
        case CorrectionMethod.ICEPOP:
            return _banded(x_BT, real_BT=real_BT, plan=plan)
        case CorrectionMethod.SEQUENCE_MASK:
            kept_B, margin_B = _within(log_product(x_BT), plan=plan)
            return _dropped(kept_B, margin_B, size_BT=x_BT.abs(), real_BT=real_BT, is_mean=False)
        case CorrectionMethod.GEOMETRIC_MASK:
            kept_B, margin_B = _within(log_geometric_mean(x_BT, mask_BT=real_BT), plan=plan)
            return _dropped(kept_B, margin_B, size_BT=x_BT.abs(), real_BT=real_BT, is_mean=True)
        case CorrectionMethod.K3_REJECT:
            mean_B = mean_k3(x_BT, mask_BT=real_BT)
            kept_B, margin_B = mean_B <= plan.cap, (mean_B - plan.cap).abs()
            size_BT = x_BT.abs() + x_BT.clamp(-CLAMP, CLAMP).exp()
            return _dropped(kept_B, margin_B, size_BT=size_BT, real_BT=real_BT, is_mean=True)


def _for_loss(raw_BT: Tensor, *, plan: CorrectionPlan) -> Tensor:
    """The weights that `acr`'s loss gets, which truncates by itself; see trainer/tightened.py."""
    return raw_BT if plan.loss_cap is None or plan.cap is None else raw_BT * (plan.loss_cap / plan.cap)


def _weighed(weights_BT: Tensor | None, *, raw_BT: Tensor, real_BT: Tensor, cap: float | None) -> Corrected:
    acted_BT = torch.zeros_like(real_BT) if cap is None else (raw_BT > cap) & real_BT
    return Corrected(weights_BT, real_BT, acted_BT, torch.full_like(raw_BT, torch.inf))


def _banded(x_BT: Tensor, *, real_BT: Tensor, plan: CorrectionPlan) -> Corrected:
    kept_BT, margin_BT = _within(x_BT.clamp(-CLAMP, CLAMP), plan=plan)
    weights_BT = token_weights(x_BT, mask_BT=real_BT & kept_BT)
    return Corrected(weights_BT, real_BT, real_BT & ~kept_BT, margin_BT / (FLOAT32_SLACK * (1 + x_BT.abs())))


def _within(stat: Tensor, *, plan: CorrectionPlan) -> tuple[Tensor, Tensor]:
    """(low <= exp(stat) <= high, nats from the nearer bound)."""
    if plan.bounds is None:
        raise ValueError(f"{plan.method} has no bounds")
    low, high = torch.tensor(plan.bounds, dtype=stat.dtype).log()
    return (stat >= low) & (stat <= high), torch.minimum((stat - low).abs(), (stat - high).abs())


def _dropped(kept_B: Tensor, margin_B: Tensor, *, size_BT: Tensor, real_BT: Tensor, is_mean: bool) -> Corrected:
    """size_BT: of the terms that were summed.  is_mean: their mean was compared, and its rounding is a mean too."""
    kept_BT = kept_B.unsqueeze(-1) & real_BT
    slack_B = FLOAT32_SLACK * (1 + (size_BT * real_BT).sum(dim=-1))
    slack_B = slack_B / real_BT.sum(dim=-1).clamp(min=1) if is_mean else slack_B
    return Corrected(None, kept_BT, real_BT & ~kept_BT, (margin_B / slack_B).unsqueeze(-1).expand_as(size_BT))


def upper_clip(raw_BT: Tensor, *, cap: float, clip_high: float) -> Tensor:
    """[B, T] the upper bound of the probability ratio under `acr`: (1 + clip_high) * max(1, w / cap).

    raw_BT: weights before truncation.  Exactly 1 + clip_high where nothing was truncated.
    """
    return (1 + clip_high) * (raw_BT.detach() / cap).clamp(min=1)

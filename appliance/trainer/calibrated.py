"""Calibrated clipping: clip bounds refitted to what full precision would clip.

R = p_theta / p_trainer of a token, in full precision on both sides; B = p_theta / p_rollout, as PPO has it without any
correction: the policy that sampled stands in the denominator. The objective is PPO's, in B:

    min(B * A, clip(B, 1 - low, 1 + high) * A)

With quantised rollouts B scatters although the policy did not move, so that the recipe's bounds clip tokens for the
quantisation alone. Every `shadow_every` steps a shadow pass in full precision, over part of the batch, gives R and B of
the same tokens, and the bounds are moved to where B clips as many tokens as the recipe's bounds clip of R:

    #(B > 1 + high) = #(R > 1 + clip_high)        #(B < 1 - low) = #(R < 1 - clip_low)        as far as they were more

The source fits clip bounds against a BF16 pass where training itself runs in FP8; only the idea and the period of 20
steps were at hand. Chosen here:

* The trainer of this program is in full precision, the rollouts are not. The noise is therefore in the denominator, and
  the ratio to calibrate is B. (R needs no calibration: both sides are exact. That is the clipping of `tis`.)
* The shadow pass follows the step's update: before it p_theta is p_trainer, R is 1 and nothing is clipped.
* Bounds are order statistics of the sample, matched on each side by itself: exact, with no model of the noise.
* A bound is only ever widened. Where B clips no more than R the recipe's bound stays: a sample that nobody leaves says
  nothing of where the policy may go. Without any mismatch the bounds are therefore exactly the recipe's.
* No bound leaves 1/cap..cap, whatever the sample says.
* The first step has the recipe's bounds; a fit holds from the next step to the next fit.

Legend: T tokens of the shadow batch, without padding; float64.  Source: arXiv 2609.22870.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from appliance.errors import NumericsError
from appliance.quant.correction import ClipRange

USED_LOW, USED_HIGH = "actor/clip_range_low", "actor/clip_range_high"  # what our loss reports among verl's metrics
_LARGEST = 20.0  # nats, where verl clamps a ratio


@dataclass(frozen=True)
class Fit:
    """bounds: before any cap.  above, below: tokens that the recipe's bounds clip in full precision.

    unfitted_above, unfitted_below: tokens that they would clip of B.  tokens: of the shadow batch.
    """

    bounds: ClipRange
    tokens: int
    above: int
    below: int
    unfitted_above: int
    unfitted_below: int


def fit_bounds(full_T: Tensor, *, rollout_T: Tensor, nominal: ClipRange) -> Fit:
    """full_T: log R.  rollout_T: log B, of the same tokens; nats.  nominal: the recipe's range.

    Raises NumericsError when a value is not finite.
    """
    full_T, rollout_T = full_T.detach().double(), rollout_T.detach().double()
    if not bool(torch.isfinite(full_T).all() and torch.isfinite(rollout_T).all()):
        raise NumericsError("a log-probability of the shadow batch is not finite")
    upper, lower = math.log1p(nominal.high), math.log1p(-nominal.low)
    above, below = int((full_T > upper).sum()), int((full_T < lower).sum())
    unfitted_above, unfitted_below = int((rollout_T > upper).sum()), int((rollout_T < lower).sum())
    sorted_T = rollout_T.clamp(-_LARGEST, _LARGEST).sort().values
    high, low = nominal.high, nominal.low
    if unfitted_above > above:
        high = math.expm1(float(sorted_T[-1 - above]))  # `above` tokens lie beyond it
    if unfitted_below > below:
        low = -math.expm1(float(sorted_T[below]))  # `below` tokens lie before it
    return Fit(ClipRange(low, high), len(sorted_T), above, below, unfitted_above, unfitted_below)


def within_cap(bounds: ClipRange, *, nominal: ClipRange, cap: float) -> ClipRange:
    """The range cut to 1/cap..cap, but never inside the recipe's. cap: > 0."""
    return ClipRange(
        low=max(nominal.low, min(bounds.low, 1 - 1 / cap)),
        high=max(nominal.high, min(bounds.high, cap - 1)),
    )


def outside(x_BT: Tensor, *, bounds: ClipRange) -> Tensor:
    """Tokens whose B is outside before any update, where B is w = exp(x). x_BT: from `corrections.log_ratio`."""
    return (x_BT > math.log1p(bounds.high)) | (x_BT < math.log1p(-bounds.low))

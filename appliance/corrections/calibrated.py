"""Calibrated clipping: clip bounds refitted to what full precision would clip.

R = p_theta / p_trainer of a token, in full precision on both sides; B = p_theta / p_rollout, as PPO has it without any
correction: the policy that sampled is the denominator. The objective is PPO's, in B:

    min(B * A, clip(B, 1 - low, 1 + high) * A)

With quantised rollouts B scatters although the policy did not move, so that the recipe's bounds clip tokens for the
quantisation alone. Every `shadow_every` steps a shadow pass in full precision, over part of the batch, gives R and B of
the same tokens, and the bounds are moved to where B clips as many tokens as the recipe's bounds clip of R:

    #(B > 1 + high) = #(R > 1 + clip_high)        #(B < 1 - low) = #(R < 1 - clip_low)        as far as they were more

The source fits clip bounds against a BF16 pass where training itself runs in FP8; only the idea and the period of 20
steps were at hand. Chosen here:

* The trainer is in full precision, the rollouts are not: the noise is in the denominator, and B is what to calibrate.
* The shadow pass follows the step's update: before it p_theta is p_trainer, R is 1 and nothing is clipped. So it is
  after a first step of a warm-up, whose learning rate is 0: until the next fit no noise of that sample is clipped,
  within 1/cap..cap.
* Bounds are order statistics of the sample, matched on each side by itself: exact, with no model of the noise.
* A bound is only ever widened, and never beyond 1/cap..cap. Where B clips no more than R the recipe's bound stays: a
  sample that nobody leaves says nothing of where the policy may go.
* The first step has the recipe's bounds; a fit is used from the next step to the next fit.

Legend: base.py; of a fit, T tokens of the shadow batch, without padding; float64.  Source: arXiv 2609.22870.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from appliance.corrections.base import CLAMP, Corrected, LossCorrection, StepPart
from appliance.corrections.objective import ClipRange
from appliance.errors import NumericsError
from appliance.finding import Finding, fault

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CalibratedClipping(LossCorrection):
    name = "calibrated-clipping"
    compared = "`p_policy / p_rollout` of a token"
    effect = (
        "no weight: PPO's ratio is to the rollout policy, "
        "clipped between bounds that are refitted, never beyond 1/cap and cap"
    )
    usual_cap = 2.0
    source = "the cap of tis: no bound leaves 1/cap..cap"
    clips = True
    ratio_to = "rollout_log_probs"
    has_shadow_pass = True
    of_tokens = True

    fitted: ClipRange | None = None
    """Range that the last shadow pass fitted; None before the first."""

    @property
    def clip_range(self) -> ClipRange:
        """Fitted range, cut to 1/cap..cap, but never inside the recipe's."""
        fitted = self.fitted or self.clip
        return ClipRange(
            low=max(self.clip.low, min(fitted.low, 1 - 1 / self.cap)),
            high=max(self.clip.high, min(fitted.high, self.cap - 1)),
        )

    def act(self, x_BT: Tensor, *, real_BT: Tensor) -> Corrected:
        """Clip without weights. acted_BT: clipped for the quantisation alone. Before any update p_theta is
        p_trainer, and B is w."""
        low, high = self.clip_range.low, self.clip_range.high
        return Corrected(
            acted_BT=(x_BT > math.log1p(high)) | (x_BT < math.log1p(-low)),
            lower_BT=x_BT.new_full(x_BT.shape, 1 - low),
            upper_BT=x_BT.new_full(x_BT.shape, 1 + high),
        )

    def for_step(self, parts: Iterable[StepPart], *, fitted: ClipRange | None) -> LossCorrection:
        return replace(self, fitted=fitted)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float | None]:
        bounds = {"clip_bound_low": 1 - self.clip_range.low, "clip_bound_high": 1 + self.clip_range.high}
        return super().metrics(sums) | bounds

    @classmethod
    def refusals(cls, *, cap: float | None, bounds: tuple[float, ...] | None, clip: ClipRange) -> Iterator[Finding]:
        yield from super().refusals(cap=cap, bounds=bounds, clip=clip)
        cap = cap or cls.usual_cap
        least = max(1 + clip.high, 1 / (1 - clip.low)) if clip.low < 1 else 0.0  # of a loss that it does not go with
        if cap < least:
            span = f"{1 - clip.low:g}..{1 + clip.high:g}"
            message = f"1/{cap:g}..{cap:g} leaves out a part of the clip range {span}, which can only be widened"
            keys = ("correction.cap", "algorithm.clip_high", "correction.method")
            yield fault(keys, message, f"give at least {least:.4g}")


@dataclass(frozen=True)
class Fit:
    bounds: ClipRange
    """Fitted bounds, before any cap."""
    tokens: int
    """Tokens of the shadow batch."""
    above: int
    """Tokens that the recipe's upper bound clips in full precision."""
    below: int
    """Tokens that the recipe's lower bound clips in full precision."""
    unfitted_above: int
    """Tokens that the recipe's upper bound would clip of B."""
    unfitted_below: int
    """Tokens that the recipe's lower bound would clip of B."""


def fit_bounds(full_T: Tensor, *, rollout_T: Tensor, nominal: ClipRange) -> Fit:
    """Fit the bounds. full_T: log R.  rollout_T: log B, of the same tokens; nats.  nominal: the recipe's range.
    Raises NumericsError when a value is not finite."""
    full_T, rollout_T = full_T.detach().double(), rollout_T.detach().double()
    if not bool(full_T.isfinite().all() and rollout_T.isfinite().all()):
        raise NumericsError("a log-probability of the shadow batch is not finite")
    upper, lower = math.log1p(nominal.high), math.log1p(-nominal.low)
    above, below = int((full_T > upper).sum()), int((full_T < lower).sum())
    unfitted_above, unfitted_below = int((rollout_T > upper).sum()), int((rollout_T < lower).sum())
    sorted_T = rollout_T.clamp(-CLAMP, CLAMP).sort().values
    high, low = nominal.high, nominal.low
    if unfitted_above > above:
        high = math.expm1(float(sorted_T[-1 - above]))  # `above` tokens lie beyond it
    if unfitted_below > below:
        low = -math.expm1(float(sorted_T[below]))  # `below` tokens lie before it
    return Fit(ClipRange(low, high), len(sorted_T), above, below, unfitted_above, unfitted_below)

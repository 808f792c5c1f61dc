"""A plain word for how far the rollout policy is from the trainer's.

By the usual bounds of guard/policy.py, whatever the recipe's guard has. All before truncation.
"""

from __future__ import annotations

from dataclasses import dataclass

from appliance.guard.policy import ESS, K3_KL, WEIGHT_MEAN
from appliance.record.events import StepMetrics


@dataclass(frozen=True)
class Verdict:
    """word: `fine`, `bad` or `unknown`.  reasons: what is outside its bounds."""

    word: str
    reasons: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        return self.word != "bad"


def judge(step: StepMetrics) -> Verdict:
    """The verdict on one step; `unknown` when none of its signals is there."""
    k3, ess, weight = step.mismatch_k3_kl, step.is_ess, step.is_weight_mean
    if k3 is None and ess is None and weight is None and not step.nonfinite_fraction:
        return Verdict("unknown")
    low, high = WEIGHT_MEAN
    reasons = []
    if step.nonfinite_fraction:
        reasons.append(f"log-probs of {step.nonfinite_fraction:.2%} of the tokens are not finite")
    if k3 is not None and k3 >= K3_KL:
        reasons.append(f"k3 {k3:.2g} is not below {K3_KL}")
    if ess is not None and ess <= ESS:
        reasons.append(f"ESS {ess:.2f} is not above {ESS}")
    if weight is not None and not low <= weight <= high:
        reasons.append(f"mean weight {weight:.2f} is not within {low:g} to {high:g}")
    return Verdict("bad" if reasons else "fine", tuple(reasons))

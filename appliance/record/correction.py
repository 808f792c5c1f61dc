"""The part of a plan that says how rollouts of other log-probs are corrected."""

from __future__ import annotations

from appliance.corrections.base import Correction
from appliance.corrections.objective import ClipRange, Loss
from appliance.corrections.registry import CorrectionMethod, correction_of
from appliance.files import Frozen


class ShadowPlan(Frozen):
    """The shadow batch of `calibrated-clipping`."""

    every: int
    """Steps between two, after the first update."""
    sequences: int
    """Of the step's, in one batch."""
    micro_batch_sequences: int
    """Of one forward; divides a rank's share."""


class CorrectionPlan(Frozen):
    """The loss, and what corrects it."""

    method: CorrectionMethod
    cap: float | None = None
    """None where the method has none."""
    bounds: tuple[float, float] | None = None
    """None where the method has none."""
    clip_high: float = 0.2
    """The recipe's."""
    clip_low: float = 0.2
    """The recipe's."""
    shadow: ShadowPlan | None = None
    loss: Loss = Loss.PPO

    @property
    def resolved(self) -> Correction:
        clip = ClipRange(self.clip_low, self.clip_high)
        return correction_of(self.method, cap=self.cap, bounds=self.bounds, clip=clip, loss=self.loss)

    @property
    def text(self) -> str:
        """`tis with cap 2`, `tbpo, tis-geometric with cap 2`."""
        return self.resolved.text if self.loss is Loss.PPO else f"{self.loss}, {self.resolved.text}"

"""Adaptive importance sampling: how much of the correction one step gets, from what its own weights say.

    share = reliability * severity / amplification                           0..1, one number per step
    weight of a token = 1 + share * (min(w, cap) - 1)                         in (0, max(1, cap)]

    reliability    (sum w)^2 / (n sum w^2)                                    effective sample size, 0..1
    severity       1 - exp(-k3 / K3_SCALE), k3 = mean(exp(x) - 1 - x)         0..1
    amplification  max(1, sum (min(w, cap) A)^2 / sum A^2)                    of the gradient's second moment, >= 1

Where rollouts and trainer agree, the share is near 0 and the loss is the uncorrected one; where they differ and the
weights can be trusted it is near 1 and the loss is that of `tis`.

The source mixes the uncorrected and the corrected gradient by one coefficient per batch, from the reliability of the
weights, the severity of the divergence and the amplification of variance. Only its abstract was at hand: the three
formulas and their product are ours, and a weight that is linear in the share mixes the two gradients exactly.

Source: arXiv 2605.13907 (AIS).  Legend: base.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from appliance.corrections.base import CLAMP, Corrected, LossCorrection, StepPart, token_weights
from appliance.corrections.objective import ClipRange
from appliance.errors import NumericsError

if TYPE_CHECKING:
    from torch import Tensor

K3_SCALE = 0.005  # nats: at 0.015, where others call a mismatch bad, the severity is 0.95


@dataclass(frozen=True)
class Adaptive(LossCorrection):
    name = "adaptive"
    compared = "`w` of a token, and the whole step"
    effect = "weighted by `1 + share * (min(w, cap) - 1)`, with one share of 0 to 1 for each step"
    usual_cap = 2.0
    source = "the cap of tis"
    cuts_tokens = True
    of_tokens = True
    reads_step = True

    share: float | None = None
    """Share of the correction that this step gets; None before it is measured."""

    def act(self, x_BT: Tensor, *, real_BT: Tensor) -> Corrected:
        w_BT = token_weights(x_BT)
        return Corrected(weights_BT=1 + self.share * (w_BT.clamp(max=self.cap) - 1), acted_BT=w_BT > self.cap)

    def for_step(self, parts: Iterable[StepPart], *, fitted: ClipRange | None) -> LossCorrection:
        """Return the correction with the share of this step. Raises NumericsError when an advantage is not finite."""
        sums: Counter[str] = Counter()
        for part in parts:
            sums.update(moments(part, cap=self.cap))
        return replace(self, share=mixing(sums))

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float | None]:
        return super().metrics(sums) | {"adaptive_share": self.share}


def moments(part: StepPart, *, cap: float) -> dict[str, float]:
    """Sum over the tokens of a part of a step; parts add up."""
    real_BT = part.real_BT.bool()
    x_T = part.x_BT[real_BT].clamp(-CLAMP, CLAMP)
    w_T, advantage_T = x_T.exp(), part.advantages_BT.detach().double()[real_BT]
    if not bool(advantage_T.isfinite().all()):
        raise NumericsError("an advantage of this step is not finite")
    return dict(
        tokens=int(real_BT.sum()),
        weight=float(w_T.sum()),
        weight_squared=float(w_T.square().sum()),
        k3=float((x_T.expm1() - x_T).sum()),
        corrected_squared=float((w_T.clamp(max=cap) * advantage_T).square().sum()),
        uncorrected_squared=float(advantage_T.square().sum()),
    )


def mixing(sums: Mapping[str, float]) -> float:
    """Return the share, 0..1. A step without tokens gets 0; without any advantage nothing is amplified."""
    tokens, plain = sums.get("tokens"), sums.get("uncorrected_squared")
    if not tokens:
        return 0.0
    reliability = min(1.0, sums["weight"] ** 2 / (tokens * sums["weight_squared"]))  # rounding can pass 1
    severity = -math.expm1(-max(0.0, sums["k3"]) / tokens / K3_SCALE)
    amplification = max(1.0, sums["corrected_squared"] / plain) if plain else 1.0
    return reliability * severity / amplification

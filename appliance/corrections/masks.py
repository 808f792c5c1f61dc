"""Corrections that weigh nothing: a sequence stays or is dropped whole, by one number of it.

Source: verl 0.9.1, trainer/ppo/rollout_corr_helper.py. Its k1 is log(p_rollout / p_trainer), -x; bounds here are of w.
Legend: base.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.corrections.base import CLAMP, REJECT_K3_ABOVE, ClipRange, Corrected, Correction, Refusal, mean_k3

if TYPE_CHECKING:
    from torch import Tensor

MAX_K3 = 1.0  # nats per token; a sequence this far away is another policy's


class SequenceMask(Correction):
    name = "sequence-mask"
    compared = "product of a sequence's `w`"
    effect = "the sequence is dropped outside"
    usual_bounds = (0.5, 2.0)
    source = "verl's bounds for a product"

    def log_statistic(self, x_BT: Tensor, *, real_BT: Tensor) -> Tensor:
        """[B] log of what is compared with the bounds; 0 for a sequence without tokens."""
        return x_BT.clamp(-CLAMP, CLAMP).sum(dim=-1)

    def act(self, x_BT: Tensor, *, real_BT: Tensor) -> Corrected:
        low, high = map(math.log, self.bounds)
        log_B = self.log_statistic(x_BT, real_BT=real_BT)
        return _dropped((log_B < low) | (log_B > high), real_BT=real_BT)


class GeometricMask(SequenceMask):
    name = "geometric-mask"
    compared = "geometric mean of a sequence's `w`"
    usual_bounds = (0.999, 1.001)
    source = "verl's bounds for a geometric mean"

    def log_statistic(self, x_BT: Tensor, *, real_BT: Tensor) -> Tensor:
        return super().log_statistic(x_BT, real_BT=real_BT) / real_BT.sum(dim=-1).clamp(min=1)


class K3Reject(Correction):
    name = "k3-reject"
    compared = "mean of `exp(x) - 1 - x` over a sequence, nats"
    effect = "the sequence is dropped above"
    usual_cap = REJECT_K3_ABOVE
    source = "verl's limit for a sequence's k3-KL, nats"

    def act(self, x_BT: Tensor, *, real_BT: Tensor) -> Corrected:
        return _dropped(mean_k3(x_BT, real_BT=real_BT) > self.cap, real_BT=real_BT)

    def tightened(self) -> Correction:
        """It drops above half of its limit."""
        return replace(self, cap=self.cap / 2)

    @classmethod
    def refusals(cls, *, cap: float | None, bounds: tuple[float, ...] | None, clip: ClipRange) -> Iterator[Refusal]:
        yield from super().refusals(cap=cap, bounds=bounds, clip=clip)
        if cap is not None and cap > MAX_K3:
            message = f"the cap of `{cls.name}` is a sequence's k3-KL in nats, and {cap:g} rejects next to nothing"
            yield ("correction.cap",), message, f"give one such as {cls.usual_cap:g}, or null"


def _dropped(goes_B: Tensor, *, real_BT: Tensor) -> Corrected:
    goes_BT = goes_B.unsqueeze(-1) & real_BT
    return Corrected(kept_BT=~goes_BT, acted_BT=goes_BT)

"""Adaptive importance sampling: how much of the correction one batch gets, from what its own weights say.

    lambda = reliability * severity / amplification                          0..1, one number per step
    weight of a token = 1 + lambda * (min(w, cap) - 1)                        in (0, max(1, cap)]

    reliability    (sum w)^2 / (n sum w^2)                                    effective sample size, 0..1
    severity       1 - exp(-k3 / K3_SCALE), k3 = mean(exp(x) - 1 - x)         0..1
    amplification  max(1, sum (min(w, cap) A)^2 / sum A^2)                    of the gradient's second moment, >= 1

Where rollouts and trainer agree, lambda is near 0 and the loss is the uncorrected one; where they differ and the
weights can be trusted it is near 1 and the loss is that of `tis`.

The source mixes the uncorrected and the corrected gradient by one coefficient per batch, from the reliability of the
weights, the severity of the divergence and the amplification of variance. Only its abstract was at hand: the three
formulas and their product are ours, and a weight that is linear in lambda mixes the two gradients exactly.

How the number travels: verl's policy loss has no channel for a value that changes at run time, and its configuration
is frozen in every worker. But the loss multiplies by a field of the batch, so lambda goes into that field: computed
once on the driver, from all tokens of the step, and written as weights (trainer/correction_step.py). Mini-batches,
micro-batches and ranks then share it by themselves, the loss stays verl's own, and nothing has to be told to a worker.

Source: arXiv 2605.13907 (AIS).  Legend: B sequences, T tokens, padded; x_BT and w as in trainer/corrections.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from appliance.errors import NumericsError
from appliance.trainer.corrections import CLAMP, token_weights

K3_SCALE = 0.005  # nats: at 0.015, where others call a mismatch bad, the severity is 0.95


@dataclass(frozen=True)
class Moments:
    """Sums over the tokens of a batch or of a part of it; parts add up."""

    tokens: int = 0
    weight: float = 0.0
    weight_squared: float = 0.0
    k3: float = 0.0
    corrected_squared: float = 0.0
    uncorrected_squared: float = 0.0

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.tokens + other.tokens,
            self.weight + other.weight,
            self.weight_squared + other.weight_squared,
            self.k3 + other.k3,
            self.corrected_squared + other.corrected_squared,
            self.uncorrected_squared + other.uncorrected_squared,
        )


def moments(x_BT: Tensor, *, mask_BT: Tensor, advantages_BT: Tensor, cap: float) -> Moments:
    """x_BT: from `log_ratio`.  Raises NumericsError when an advantage is not finite."""
    real_BT = mask_BT.bool()
    x_T = x_BT[real_BT].clamp(-CLAMP, CLAMP)
    w_T = token_weights(x_BT, mask_BT=real_BT)[real_BT]
    advantage_T = advantages_BT.detach().double()[real_BT]
    if not bool(torch.isfinite(advantage_T).all()):
        raise NumericsError("an advantage of this step is not finite")
    return Moments(
        tokens=int(real_BT.sum()),
        weight=float(w_T.sum()),
        weight_squared=float(w_T.square().sum()),
        k3=float((torch.expm1(x_T) - x_T).sum()),
        corrected_squared=float((w_T.clamp(max=cap) * advantage_T).square().sum()),
        uncorrected_squared=float(advantage_T.square().sum()),
    )


def mixing(found: Moments) -> float:
    """lambda, 0..1. A batch without tokens gets 0; without any advantage nothing is amplified."""
    if not found.tokens:
        return 0.0
    reliability = min(1.0, found.weight**2 / (found.tokens * found.weight_squared))  # rounding can pass 1
    severity = -math.expm1(-max(0.0, found.k3) / found.tokens / K3_SCALE)
    plain = found.uncorrected_squared
    amplification = max(1.0, found.corrected_squared / plain) if plain else 1.0
    return reliability * severity / amplification

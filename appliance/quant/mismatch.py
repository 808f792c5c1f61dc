"""How far the rollout policy is from the trainer's: pure functions of two log-probabilities per token.

Legend: T response tokens of one step, padding already removed.
    x_T = log p_trainer - log p_rollout      nats, float64
    w_T = exp(x_T)                           importance weight before truncation
    kl  = mean(-x)                           k1 estimate of KL(rollout || trainer), nats
    k3  = mean(exp(x) - 1 - x)               k3 estimate of the same, never negative, nats
    ess = (sum w)^2 / (T sum w^2)            effective sample size as a share of T, 0..1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from appliance.errors import NumericsError

NOT_FINITE = "a log-probability of this step's rollouts is not finite"


@dataclass(frozen=True)
class Mismatch:
    """One step's mismatch; units in the module's legend, probabilities and fractions 0..1."""

    k3_kl: float
    kl: float
    probs_diff_mean: float
    probs_diff_max: float
    weight_mean: float
    weight_std: float
    weight_max: float
    ess: float
    truncated_fraction: float
    truncated_weight_mean: float


def measure_mismatch(trainer_T: Tensor, *, rollout_T: Tensor, cap: float | None) -> Mismatch:
    """Statistics before truncation, and the share of tokens whose weight is above `cap` (0 where cap is None).

    trainer_T, rollout_T: [T] log-probabilities in nats, T > 0.  cap: > 0.
    Raises NumericsError when a value is not finite, ValueError when T is 0 or the lengths differ.
    Source: Yao et al. 2025 (weights), Schulman 2020, "Approximating KL divergence" (k1, k3).
    """
    if trainer_T.shape != rollout_T.shape or trainer_T.numel() == 0:
        raise ValueError(f"two equally long, non-empty vectors are needed, got {trainer_T.shape} and {rollout_T.shape}")
    trainer, rollout = trainer_T.double(), rollout_T.double()
    x_T = trainer - rollout
    w_T = x_T.exp()
    if not bool((torch.isfinite(x_T) & torch.isfinite(w_T)).all()):  # exp(-inf) is a finite weight, and exp(800) is not
        raise NumericsError(NOT_FINITE)
    diff_T = (trainer.exp() - rollout.exp()).abs()
    return Mismatch(
        k3_kl=float((torch.expm1(x_T) - x_T).mean()),
        kl=float(-x_T.mean()),
        probs_diff_mean=float(diff_T.mean()),
        probs_diff_max=float(diff_T.max()),
        weight_mean=float(w_T.mean()),
        weight_std=float(w_T.std(correction=0)),
        weight_max=float(w_T.max()),
        ess=min(1.0, float(w_T.sum() ** 2 / (w_T.numel() * (w_T**2).sum()))),  # rounding can reach 1 + 2^-52
        truncated_fraction=0.0 if cap is None else float((w_T > cap).double().mean()),
        truncated_weight_mean=float((w_T if cap is None else w_T.clamp(max=cap)).mean()),
    )

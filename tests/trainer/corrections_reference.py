"""Every correction once more, sequence by sequence in numpy's float64, from the definitions in docs/corrections.md."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from appliance.plan.model import CorrectionPlan
from appliance.quant.correction import CorrectionMethod as Method

# Bounds that are not each other's inverse: a threshold turned over, or not turned over, shows.
PLANS = {
    Method.TIS: CorrectionPlan(method=Method.TIS, cap=1.5),
    Method.TIS_SEQUENCE: CorrectionPlan(method=Method.TIS_SEQUENCE, cap=1.5),
    Method.ICEPOP: CorrectionPlan(method=Method.ICEPOP, bounds=(0.75, 3.0)),
    Method.SEQUENCE_MASK: CorrectionPlan(method=Method.SEQUENCE_MASK, bounds=(0.75, 3.0)),
    Method.GEOMETRIC_MASK: CorrectionPlan(method=Method.GEOMETRIC_MASK, bounds=(0.97, 1.15)),
    Method.K3_REJECT: CorrectionPlan(method=Method.K3_REJECT, cap=0.04),
    Method.ACR: CorrectionPlan(method=Method.ACR, cap=1.5),
    Method.ADAPTIVE: CorrectionPlan(method=Method.ADAPTIVE, cap=1.5),
    Method.CALIBRATED_CLIPPING: CorrectionPlan(
        method=Method.CALIBRATED_CLIPPING, cap=2.0, clip_low=0.25, clip_high=0.5
    ),
}
SHARE = 0.4  # of the correction that `adaptive` applies


@dataclass(frozen=True)
class Case:
    """A batch in float32: log-probs [B, T] with junk at padding, lengths of 1 to T tokens."""

    trainer_BT: Tensor
    rollout_BT: Tensor
    mask_BT: Tensor

    def rows(self, tensor_BT: Tensor) -> tuple[Tensor, ...]:
        """Without padding, as verl's queue holds it."""
        lengths = self.mask_BT.sum(dim=-1).tolist()
        return tuple(row[:length] for row, length in zip(tensor_BT, lengths, strict=True))


def make_case(seed: int, *, sequences: int = 64, tokens: int = 24, spread: float = 0.3) -> Case:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, tokens + 1, sequences)
    mask = np.arange(tokens) < lengths[:, None]
    rollout = -rng.exponential(1.0, (sequences, tokens)) - 1
    trainer = rollout + rng.normal(0, spread, (sequences, tokens))
    return Case(*(torch.from_numpy(each) for each in (trainer.astype(np.float32), rollout.astype(np.float32), mask)))


def reference(case: Case, *, plan: CorrectionPlan) -> tuple[list[list[float]] | None, list[list[bool]]]:
    """(weights or None, tokens that stay), one list per sequence without padding."""
    weights, stay = [], []
    for trainer, rollout in zip(case.rows(case.trainer_BT), case.rows(case.rollout_BT), strict=True):
        x = [float(one) - float(other) for one, other in zip(trainer, rollout, strict=True)]
        w = np.exp(x)
        low, high = plan.bounds or (0.0, 0.0)
        keeps = True
        match plan.method:
            case Method.TIS:
                w = np.minimum(w, plan.cap)
            case Method.ADAPTIVE:
                w = 1 + SHARE * (np.minimum(w, plan.cap) - 1)
            case Method.TIS_SEQUENCE:
                w = np.full(len(x), min(np.prod(w), plan.cap))
            case Method.ICEPOP:
                w = np.array([each if low <= each <= high else 0.0 for each in w])
            case Method.SEQUENCE_MASK:
                keeps = low <= np.prod(w) <= high
            case Method.GEOMETRIC_MASK:
                keeps = low <= np.prod(w) ** (1 / len(x)) <= high
            case Method.K3_REJECT:
                keeps = np.mean(w - 1 - x) <= plan.cap
        weights.append([float(each) for each in w])
        stay.append([bool(keeps)] * len(x))
    weighs = plan.method in (Method.TIS, Method.TIS_SEQUENCE, Method.ICEPOP, Method.ACR, Method.ADAPTIVE)
    return (weights if weighs else None), stay

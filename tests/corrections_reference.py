"""Every correction once more, sequence by sequence in numpy's float64, from the definitions in docs/corrections.md."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from appliance.corrections.adaptive import Adaptive
from appliance.corrections.base import LossCorrection, StepPart, log_ratio
from appliance.corrections.objective import ClipRange
from appliance.corrections.registry import METHODS, correction_of

SHARE = 0.4  # of the correction that `adaptive` applies
# Bounds that are not each other's inverse: a threshold turned over, or not turned over, shows.
LIMITS = {
    "tis": {"cap": 1.5},
    "tis-sequence": {"cap": 1.5},
    "tis-geometric": {"cap": 1.05},
    "icepop": {"bounds": (0.75, 3.0)},
    "sequence-mask": {"bounds": (0.75, 3.0)},
    "geometric-mask": {"bounds": (0.97, 1.15)},
    "k3-reject": {"cap": 0.04},
    "acr": {"cap": 1.5},
    "adaptive": {"cap": 1.5},
    "calibrated-clipping": {"cap": 2.0, "clip": ClipRange(0.25, 0.5)},
    "score-centering-tis": {"cap": 1.5},
}
CORRECTIONS: dict[str, LossCorrection] = {name: correction_of(name, **LIMITS.get(name, {})) for name in METHODS}
# With a share, as they are for a step.
OF_A_STEP = {
    name: replace(each, share=SHARE) if isinstance(each, Adaptive) else each for name, each in CORRECTIONS.items()
}


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

    @property
    def part(self) -> StepPart:
        x_BT = log_ratio(self.trainer_BT, rollout_BT=self.rollout_BT, real_BT=self.mask_BT)
        return StepPart(x_BT, self.mask_BT, torch.ones_like(x_BT))


def make_case(seed: int, *, sequences: int = 64, tokens: int = 24, spread: float = 0.3) -> Case:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, tokens + 1, sequences)
    mask = np.arange(tokens) < lengths[:, None]
    rollout = -rng.exponential(1.0, (sequences, tokens)) - 1
    trainer = rollout + rng.normal(0, spread, (sequences, tokens))
    return Case(*(torch.from_numpy(each) for each in (trainer.astype(np.float32), rollout.astype(np.float32), mask)))


def reference(
    case: Case, *, correction: LossCorrection, share: float = SHARE
) -> tuple[list[list[float]], list[list[bool]]]:
    """(weights, tokens that stay), one list per sequence without padding."""
    weights, stay = [], []
    for trainer, rollout in zip(case.rows(case.trainer_BT), case.rows(case.rollout_BT), strict=True):
        x = [float(one) - float(other) for one, other in zip(trainer, rollout, strict=True)]
        w, used = np.exp(x), np.ones(len(x))
        low, high = correction.bounds or (0.0, 0.0)
        k3 = np.mean(w - 1 - x)
        keeps = correction.reject_k3_above is None or k3 <= correction.reject_k3_above
        match correction.name:
            case "tis" | "acr" | "score-centering-tis":
                used = np.minimum(w, correction.cap)
            case "adaptive":
                used = 1 + share * (np.minimum(w, correction.cap) - 1)
            case "tis-sequence":
                used = np.full(len(x), min(np.prod(w), correction.cap))
            case "tis-geometric":
                used = np.full(len(x), min(np.prod(w) ** (1 / len(x)), correction.cap))
            case "icepop":
                used = np.array([each if low <= each <= high else 0.0 for each in w])
            case "sequence-mask":
                keeps = keeps and low <= np.prod(w) <= high
            case "geometric-mask":
                keeps = keeps and low <= np.prod(w) ** (1 / len(x)) <= high
            case "k3-reject":
                keeps = keeps and k3 <= correction.cap
        weights.append([float(each) for each in used])
        stay.append([bool(keeps)] * len(x))
    return weights, stay

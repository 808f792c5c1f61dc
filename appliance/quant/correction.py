"""The closed set of corrections, and the limits that each takes. Imports no torch.

w = p_trainer / p_rollout per token, x = log w. What a method compares with its limits:

    tis             w of a token                   cut at cap
    tis-sequence    product of a sequence's w      cut at cap
    icepop          w of a token                   0 outside bounds
    sequence-mask   product of a sequence's w      sequence dropped outside bounds
    geometric-mask  geometric mean of a sequence   sequence dropped outside bounds
    k3-reject       mean of exp(x) - 1 - x, nats   sequence dropped above cap
    acr             w of a token                   cut at cap; where cut, the upper clip bound times w / cap
    adaptive        w of a token                   cut at cap, and only a share of it applied, chosen for each step
    calibrated-clipping  no weight: PPO's ratio is to the rollout policy, its clip bounds are refitted within 1/cap..cap

Sources: Yao et al. 2025 (truncated importance sampling), verl 0.9.1's presets (masks and rejection),
arXiv 2602.13953 (ACR), arXiv 2605.13907 (AIS, `adaptive`), arXiv 2609.22870 (calibrated clipping).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CorrectionMethod(StrEnum):
    NONE = "none"
    TIS = "tis"
    TIS_SEQUENCE = "tis-sequence"
    ICEPOP = "icepop"
    SEQUENCE_MASK = "sequence-mask"
    GEOMETRIC_MASK = "geometric-mask"
    K3_REJECT = "k3-reject"
    ACR = "acr"
    ADAPTIVE = "adaptive"
    CALIBRATED_CLIPPING = "calibrated-clipping"


@dataclass(frozen=True)
class ClipRange:
    """The probability ratio is clipped to 1 - low .. 1 + high. low: 0..1, high: > 0."""

    low: float
    high: float


@dataclass(frozen=True)
class Limits:
    """cap: > 0.  bounds: (low, high), 0 < low < high.  None where the method has none.  source: of a default."""

    cap: float | None = None
    bounds: tuple[float, float] | None = None
    source: str = ""


USUAL: dict[CorrectionMethod, Limits] = {
    CorrectionMethod.NONE: Limits(),
    CorrectionMethod.TIS: Limits(cap=2.0, source="the cap in most published runs"),
    CorrectionMethod.TIS_SEQUENCE: Limits(cap=2.0, source="published caps of a whole sequence are 2 to 10"),
    CorrectionMethod.ICEPOP: Limits(bounds=(0.5, 5.0), source="the bounds of IcePop"),
    CorrectionMethod.SEQUENCE_MASK: Limits(bounds=(0.5, 2.0), source="verl's bounds for a product"),
    CorrectionMethod.GEOMETRIC_MASK: Limits(bounds=(0.999, 1.001), source="verl's bounds for a geometric mean"),
    CorrectionMethod.K3_REJECT: Limits(cap=0.01, source="verl's limit for a sequence's k3-KL, nats"),
    CorrectionMethod.ACR: Limits(cap=2.0, source="the cap of tis"),
    CorrectionMethod.ADAPTIVE: Limits(cap=2.0, source="the cap of tis"),
    CorrectionMethod.CALIBRATED_CLIPPING: Limits(cap=2.0, source="the cap of tis: no bound leaves 1/cap..cap"),
}


def limits(method: CorrectionMethod, *, cap: float | None, bounds: tuple[float, ...] | None) -> Limits:
    """What holds: a value that was given, else the method's usual one. A limit that the method lacks stays None.

    bounds: (low, high).
    """
    usual = USUAL[method]
    return Limits(
        cap=usual.cap if usual.cap is None or cap is None else cap,
        bounds=usual.bounds if usual.bounds is None or bounds is None else (bounds[0], bounds[1]),
        source=usual.source,
    )

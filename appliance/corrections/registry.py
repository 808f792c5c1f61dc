"""Every correction by its name: what `correction.method` takes, in the order of docs/corrections.md."""

from __future__ import annotations

from enum import StrEnum

from appliance.corrections.adaptive import Adaptive
from appliance.corrections.base import LossCorrection
from appliance.corrections.calibrated import CalibratedClipping
from appliance.corrections.centering import ScoreCentering, ScoreCenteringTis
from appliance.corrections.objective import ClipRange, Loss
from appliance.corrections.weights import (
    Acr,
    GeometricMask,
    IcePop,
    K3Reject,
    NoCorrection,
    SequenceMask,
    Tis,
    TisGeometric,
    TisSequence,
)

METHODS: dict[str, type[LossCorrection]] = {
    method.name: method
    for method in (
        NoCorrection,
        Tis,
        TisSequence,
        TisGeometric,
        IcePop,
        SequenceMask,
        GeometricMask,
        K3Reject,
        Acr,
        Adaptive,
        CalibratedClipping,
        ScoreCentering,
        ScoreCenteringTis,
    )
}
CorrectionMethod = StrEnum(
    "CorrectionMethod", {name.upper().replace("-", "_"): name for name in METHODS}, module=__name__
)
NONE, DEFAULT = CorrectionMethod(NoCorrection.name), CorrectionMethod(Tis.name)


def correction_of(
    method: str,
    *,
    cap: float | None = None,
    bounds: tuple[float, ...] | None = None,
    clip: ClipRange = ClipRange(),
    loss: Loss = Loss.PPO,
) -> LossCorrection:
    """Make a method with its limits: the given one, else the usual one; None for a limit that the method lacks."""
    method_class = METHODS[method]
    cap = method_class.usual_cap if method_class.usual_cap is None or cap is None else cap
    bounds = method_class.usual_bounds if method_class.usual_bounds is None or bounds is None else tuple(bounds)
    return method_class(cap=cap, bounds=bounds, clip=clip, loss=loss)

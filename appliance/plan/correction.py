"""What corrects the loss, decided: the recipe's method with its limits, and why where the recipe gives none."""

from __future__ import annotations

from pathlib import Path

from appliance.plan.model import Choice, CorrectionPlan, UaqPlan
from appliance.quant.correction import limits
from appliance.recipe.schema import Recipe

SCALED_FOLDER = "scaled"


def plan_correction(recipe: Recipe) -> tuple[CorrectionPlan, tuple[Choice, ...]]:
    """The plan, and a choice for a limit that the recipe leaves to the method."""
    asked = recipe.correction
    hold = limits(asked.method, cap=asked.cap, bounds=asked.bounds)
    choices = []
    if asked.cap is None and hold.cap is not None:
        choices.append(Choice("correction.cap", f"{hold.cap:g}", hold.source))
    if asked.bounds is None and hold.bounds is not None:
        choices.append(Choice("correction.bounds", f"[{hold.bounds[0]:g}, {hold.bounds[1]:g}]", hold.source))
    plan = CorrectionPlan(method=asked.method, cap=hold.cap, bounds=hold.bounds, clip_high=recipe.algorithm.clip_high)
    return plan, tuple(choices)


def plan_uaq(recipe: Recipe, *, run_dir: Path) -> tuple[UaqPlan | None, tuple[Choice, ...]]:
    """None without `uaq_scale`. The scaled model lies in the run's folder, so that a resumed run finds it there."""
    scale = recipe.correction.uaq_scale
    if scale is None:
        return None, ()
    why = f"what a norm feeds is divided by {scale:g} once before training, and model/ is folded back"
    return UaqPlan(scale, str(run_dir / SCALED_FOLDER)), (Choice("correction.uaq_scale", f"{scale:g}", why),)

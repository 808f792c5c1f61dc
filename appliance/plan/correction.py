"""What corrects the loss, decided: the recipe's method with its limits, and why where the recipe gives none."""

from __future__ import annotations

from pathlib import Path

from appliance.corrections.registry import correction_of
from appliance.plan.derive import Derived
from appliance.plan.model import Choice, CorrectionPlan, ShadowPlan, UaqPlan
from appliance.recipe.rules import data_parallel_ranks, shadow_sequences
from appliance.recipe.schema import Recipe

SCALED_FOLDER = "scaled"


def plan_correction(recipe: Recipe, *, derived: Derived) -> tuple[CorrectionPlan, tuple[Choice, ...]]:
    """The plan, and a choice for a limit that the recipe leaves to the method."""
    asked = recipe.correction
    hold = correction_of(asked.method, cap=asked.cap, bounds=asked.bounds)
    choices = []
    if asked.cap is None and hold.cap is not None:
        choices.append(Choice("correction.cap", f"{hold.cap:g}", hold.source))
    if asked.bounds is None and hold.bounds is not None:
        choices.append(Choice("correction.bounds", f"[{hold.bounds[0]:g}, {hold.bounds[1]:g}]", hold.source))
    shadow = _shadow(recipe, derived=derived) if hold.has_shadow_pass else None
    if shadow:
        choices.append(Choice("correction.shadow", *_shadow_choice(recipe, sequences=shadow.sequences)))
    plan = CorrectionPlan(
        method=asked.method,
        cap=hold.cap,
        bounds=hold.bounds,
        clip_high=recipe.algorithm.clip_high,
        clip_low=recipe.algorithm.clip_low,
        shadow=shadow,
    )
    return plan, tuple(choices)


def _shadow(recipe: Recipe, *, derived: Derived) -> ShadowPlan:
    sequences = shadow_sequences(recipe)
    share = sequences // data_parallel_ranks(recipe)
    fits = min(derived.micro_batch_sequences, share)
    micro = next(size for size in range(fits, 0, -1) if share % size == 0)
    return ShadowPlan(recipe.correction.shadow_every, sequences, micro)


def _shadow_choice(recipe: Recipe, *, sequences: int) -> tuple[str, str]:
    whole = recipe.batch.prompts_per_step * recipe.rollout.samples_per_prompt
    when = f"after step 1 and every {recipe.correction.shadow_every} steps"
    return (
        f"{sequences} sequences",
        f"{when}, {recipe.correction.shadow_fraction:g} of a step's {whole}, equal on each rank",
    )


def plan_uaq(recipe: Recipe, *, run_dir: Path) -> tuple[UaqPlan | None, tuple[Choice, ...]]:
    """None without `uaq_scale`. The scaled model lies in the run's folder, so that a resumed run finds it there."""
    scale = recipe.correction.uaq_scale
    if scale is None:
        return None, ()
    why = f"what a norm feeds is divided by {scale:g} once before training, and model/ is folded back"
    return UaqPlan(scale, str(run_dir / SCALED_FOLDER)), (Choice("correction.uaq_scale", f"{scale:g}", why),)

"""What corrects the loss, decided: the recipe's method with its limits, and why where the recipe gives none."""

from __future__ import annotations

from pathlib import Path

from appliance.corrections.registry import correction_of
from appliance.plan.derive import Book
from appliance.recipe.rules import shadow_sequences
from appliance.recipe.schema import Recipe
from appliance.record.plan import CorrectionPlan, ShadowPlan, UaqPlan

SCALED_FOLDER = "scaled"


def plan_correction(recipe: Recipe, *, micro_batch_sequences: int, book: Book) -> CorrectionPlan:
    """Noted is a limit that the recipe leaves to the method. micro_batch_sequences: of the trainer's forward."""
    asked = recipe.correction
    hold = correction_of(asked.method, cap=asked.cap, bounds=asked.bounds)
    if asked.cap is None and hold.cap is not None:
        book.note("correction.cap", f"{hold.cap:g}", hold.source)
    if asked.bounds is None and hold.bounds is not None:
        book.note("correction.bounds", f"[{hold.bounds[0]:g}, {hold.bounds[1]:g}]", hold.source)
    shadow = None
    if hold.has_shadow_pass:
        shadow = _shadow(recipe, micro_batch_sequences=micro_batch_sequences, book=book)
    return CorrectionPlan(
        method=asked.method,
        cap=hold.cap,
        bounds=hold.bounds,
        clip_high=recipe.algorithm.clip_high,
        clip_low=recipe.algorithm.clip_low,
        shadow=shadow,
    )


def _shadow(recipe: Recipe, *, micro_batch_sequences: int, book: Book) -> ShadowPlan:
    asked, sequences = recipe.correction, shadow_sequences(recipe)
    whole = recipe.batch.prompts_per_step * recipe.rollout.samples_per_prompt
    when = f"after step 1 and every {asked.shadow_every} steps"
    why = f"{when}, {asked.shadow_fraction:g} of a step's {whole}, equal on each rank"
    book.note("correction.shadow", f"{sequences} sequences", why)
    share = sequences // recipe.topology.data_parallel
    fits = min(micro_batch_sequences, share)
    micro = next(size for size in range(fits, 0, -1) if share % size == 0)
    return ShadowPlan(every=asked.shadow_every, sequences=sequences, micro_batch_sequences=micro)


def plan_uaq(recipe: Recipe, *, run_dir: Path, book: Book) -> UaqPlan | None:
    """None without `uaq_scale`. The scaled model lies in the run's folder, so that a resumed run finds it there."""
    scale = recipe.correction.uaq_scale
    if scale is None:
        return None
    why = f"what a norm feeds is divided by {scale:g} once before training, and model/ is folded back"
    book.note("correction.uaq_scale", f"{scale:g}", why)
    return UaqPlan(scale=scale, folder=str(run_dir / SCALED_FOLDER))

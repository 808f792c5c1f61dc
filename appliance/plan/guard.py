"""What the governor may do in this run, and how engines change their scheme while it lasts. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.guard.policy import Action
from appliance.plan.model import Choice, GuardPlan, RolloutPlan, Switching
from appliance.recipe.schema import Recipe

USUAL_ACTIONS = (Action.WARN, Action.TIGHTEN, Action.BF16, Action.STOP)
CHANGES_ENGINES = (Action.RAISE_PRECISION, Action.BF16)
WHY_NOT = {
    Switching.LIVE: "",
    Switching.RESTART: "engines that run CUDA graphs must be restarted for it, which this version cannot do",
    Switching.EXPERTS: "quantised experts cannot change their scheme while the engine runs",
}


def plan_guard(
    recipe: Recipe, *, rollout: RolloutPlan, is_cpu: bool, has_experts: bool
) -> tuple[GuardPlan, tuple[Choice, ...]]:
    """is_cpu: engines run eagerly.  has_experts: the model's, False where that is not known yet."""
    switching = _switching(is_cpu=is_cpu, has_experts=has_experts)
    choices = list(_switching_choice(switching, rollout=rollout))
    actions = recipe.guard.actions
    if actions is None:
        stuck = rollout.scheme.quantised and switching is not Switching.LIVE
        actions = tuple(each for each in USUAL_ACTIONS if not (stuck and each in CHANGES_ENGINES))
        why = f"without `bf16`: {WHY_NOT[switching]}" if stuck else "the usual ladder"
        choices.append(Choice("guard.actions", ", ".join(actions), why))
    keys = recipe.guard.model_dump() | {"actions": actions, "switching": switching}
    return GuardPlan(**keys), tuple(choices)


def _switching(*, is_cpu: bool, has_experts: bool) -> Switching:
    if not is_cpu:
        return Switching.RESTART
    return Switching.EXPERTS if has_experts else Switching.LIVE


def _switching_choice(switching: Switching, *, rollout: RolloutPlan) -> Iterator[Choice]:
    if rollout.scheme.quantised:
        why = WHY_NOT[switching] or "engines run eagerly: a layer changes with a weight update, proven like any"
        yield Choice("rollout.scheme_changes", str(switching), why)


def plan_validation(recipe: Recipe, *, rollout: RolloutPlan, switching: Switching, steps: int) -> tuple[int, Choice]:
    """(steps between validations in BF16 beside the run's scheme, 0 for none; why)."""
    every, why = _validation(recipe.trainer.validate_bf16_every, rollout=rollout, switching=switching, steps=steps)
    return every, Choice("trainer.validate_bf16_every", str(every), why)


def _validation(asked: int | None, *, rollout: RolloutPlan, switching: Switching, steps: int) -> tuple[int, str]:
    if not rollout.scheme.quantised:
        return 0, "rollouts are in BF16 already: one validation is both"
    if asked is not None:
        return asked, "as given, and at the end" if asked else "off"
    if switching is not Switching.LIVE:
        return 0, f"off: {WHY_NOT[switching]}"
    return steps, "only at the end: it costs a validation and two weight updates"

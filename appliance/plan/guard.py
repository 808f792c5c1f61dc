"""What the governor may do in this run, and how engines change their scheme while it lasts. Pure."""

from __future__ import annotations

from appliance.guard.policy import Action
from appliance.plan.derive import Book
from appliance.recipe.schema import Recipe, SchemeChange
from appliance.record.plan import GuardPlan, RolloutPlan, RunPlan, Switching
from appliance.terms.schemes import Scheme

USUAL_ACTIONS = (Action.WARN, Action.TIGHTEN, Action.BF16, Action.STOP)
CHANGES_ENGINES = (Action.RAISE_PRECISION, Action.BF16)
LIVE = "engines run eagerly: a layer changes with a weight update, proven like any"
GRAPHS = "the engines hold CUDA graphs and compiled layers, which know one scheme"
EXPERTS = "quantised experts cannot change their scheme while the engine runs"
RANKS = "an engine of several ranks cannot change from one emulated scheme to another while it runs"
_TWICE = "every validation in BF16 starts the engines twice"


def plan_guard(recipe: Recipe, *, rollout: RolloutPlan, experts: bool, book: Book) -> GuardPlan:
    """experts: whether a quantised engine has some in it, False where that is not known yet."""
    asked = recipe.guard.model_dump(exclude={"scheme_change", "actions"})
    actions = USUAL_ACTIONS if recipe.guard.actions is None else recipe.guard.actions
    prevents = why_not_live(rollout, actions=actions, experts=experts)
    switching, why = _switching(recipe.guard.scheme_change, prevents=prevents)
    if rollout.scheme.quantised:
        book.note("rollout.scheme_changes", switching, why)
    if recipe.guard.actions is None:
        book.note("guard.actions", ", ".join(actions), "the usual ladder")
    return GuardPlan(**asked, actions=actions, switching=switching)


def why_not_live(rollout: RolloutPlan, *, actions: tuple[Action, ...], experts: bool) -> str:
    """What prevents a change of scheme with a weight update, or nothing."""
    if not rollout.eager:
        return GRAPHS
    if experts:
        return EXPERTS
    finer = rollout.emulated and rollout.tensor_parallel > 1 and Action.RAISE_PRECISION in actions
    return RANKS if finer else ""


def finer_schemes(plan: RunPlan) -> tuple[Scheme, ...]:
    """What the rollouts may be raised to and still be quantised."""
    return plan.rollout.scheme.spec.finer if plan.guard.ranks_layers else ()


def _switching(asked: SchemeChange, *, prevents: str) -> tuple[Switching, str]:
    if asked is not SchemeChange.AUTO:
        return Switching(asked.value), "as given"
    if prevents:
        return Switching.RESTART, f"{prevents}: new rollout engines take over, the trainer stays"
    return Switching.LIVE, LIVE


def plan_validation(recipe: Recipe, *, rollout: RolloutPlan, switching: Switching, steps: int) -> tuple[int, str]:
    """(steps between validations in BF16 beside the run's scheme, 0 for none; why)."""
    asked = recipe.trainer.validate_bf16_every
    if not rollout.scheme.quantised:
        return 0, "rollouts are in BF16 already: one validation is both"
    costs = _TWICE if switching is Switching.RESTART else ""
    if asked is not None:
        how = f"as given, and at the end{costs and ': '}{costs}"
        return asked, how if asked else "off"
    if costs:
        return 0, f"off: {costs}"
    return steps, "only at the end: it costs a validation and two weight updates"

"""A change of scheme in the middle of a run that the engines cannot make as the recipe asks for it."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.plan.guard import CHANGES_ENGINES, why_not_live
from appliance.plan.model import RunPlan, Switching
from appliance.plan.stored import has_experts
from appliance.preflight.finding import Finding, Severity
from appliance.preflight.probes import InputFacts
from appliance.quant.architectures import WITH_EXPERTS
from appliance.quant.device import CPU


def judge_guard(plan: RunPlan, inputs: InputFacts) -> Iterator[Finding]:
    """A model of the hub may turn out to have experts only here."""
    changes = plan.validate_bf16_every or any(action in CHANGES_ENGINES for action in plan.guard.actions)
    if not changes or plan.guard.switching is Switching.RESTART or not plan.rollout.scheme.quantised:
        return
    found = frozenset(inputs.model_shape.architectures) if inputs.model_shape else frozenset()
    prevents = why_not_live(
        plan.rollout,
        actions=plan.guard.actions,
        is_cpu=plan.device == CPU,
        has_experts=bool(found & WITH_EXPERTS) or has_experts(plan.model),
    )
    if prevents:
        message = f"a change of scheme cannot be `live`: {prevents}"
        yield Finding(Severity.ERROR, "guard-scheme", "guard.scheme_change", message, "set it to `restart`")

"""What would change an engine's scheme in the middle of a run, where that cannot be done."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.plan.guard import CHANGES_ENGINES, WHY_NOT
from appliance.plan.model import RunPlan, Switching
from appliance.preflight.finding import Finding, Severity
from appliance.preflight.probes import InputFacts
from appliance.quant.architectures import WITH_EXPERTS


def judge_guard(plan: RunPlan, inputs: InputFacts) -> Iterator[Finding]:
    """A model of the hub may turn out to have experts only here."""
    found = frozenset(inputs.model_shape.architectures) if inputs.model_shape else frozenset()
    live = plan.guard.switching is Switching.LIVE
    switching = Switching.EXPERTS if live and found & WITH_EXPERTS else plan.guard.switching
    if switching is Switching.LIVE or not plan.rollout.scheme.quantised:
        return
    why = WHY_NOT[switching]
    for action in plan.guard.actions:
        if action in CHANGES_ENGINES:
            remedy = f"leave `{action}` out of guard.actions"
            yield Finding(Severity.ERROR, "guard-scheme", "guard.actions", f"`{action}`: {why}", remedy)
    if plan.validate_bf16_every:
        place = "trainer.validate_bf16_every"
        yield Finding(Severity.ERROR, "validate-bf16", place, f"validating in BF16 as well: {why}", "set it to 0")

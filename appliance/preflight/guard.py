"""A change of scheme in the middle of a run that cannot be made as the recipe asks for it."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.plan.experts import layers_with_experts, quantises_experts
from appliance.plan.guard import CHANGES_ENGINES, finer_schemes, why_not_live
from appliance.plan.model import RunPlan, Switching
from appliance.preflight.finding import Finding, Severity
from appliance.preflight.probes import InputFacts
from appliance.terms.schemes import BLOCK, Scales
from appliance.terms.shapes import ModelShape


def judge_guard(plan: RunPlan, inputs: InputFacts) -> Iterator[Finding]:
    yield from _live(plan, inputs)
    yield from _finer(plan, inputs.model_shape)


def _finer(plan: RunPlan, shape: ModelShape | None) -> Iterator[Finding]:
    """vLLM refuses merged layers whose blocks are cut; our emulation only where ranks cut them."""
    ranks = plan.rollout.tensor_parallel
    in_blocks = [scheme for scheme in finer_schemes(plan) if scheme.spec.scales is Scales.BLOCK]
    if shape is None or not in_blocks or (plan.rollout.emulated and ranks == 1):
        return
    widths = (shape.heads * shape.head_size, max(shape.kv_heads, ranks) * shape.head_size, shape.intermediate)
    ragged = [width // ranks for width in widths if width // ranks % BLOCK]
    if ragged:
        cut = f"whose blocks cut the {ragged[0]} channels of a layer's part"
        message = f"`raise-precision` ends with `{in_blocks[-1]}`, {cut}"
        remedy = "leave it out of guard.actions, or use other values of rollout.scheme or rollout.tensor_parallel"
        yield Finding(Severity.ERROR, "guard-blocks", "guard.actions", message, remedy)


def _live(plan: RunPlan, inputs: InputFacts) -> Iterator[Finding]:
    """A model of the hub may turn out to have experts only here."""
    changes = plan.validate_bf16_every or any(action in CHANGES_ENGINES for action in plan.guard.actions)
    if not changes or plan.guard.switching is Switching.RESTART or not plan.rollout.scheme.quantised:
        return
    shape = inputs.model_shape
    layers = layers_with_experts(plan.model)
    if shape and shape.has_experts:
        layers = max(1, shape.layers)
    quantised = {each.ignore for each in plan.rollout.replicas if each.scheme.quantised}
    experts = any(quantises_experts(ignore, layers=layers) for ignore in quantised)
    prevents = why_not_live(plan.rollout, actions=plan.guard.actions, experts=experts)
    if prevents:
        message = f"a change of scheme cannot be `live`: {prevents}"
        yield Finding(Severity.ERROR, "guard-scheme", "guard.scheme_change", message, "set it to `restart`")

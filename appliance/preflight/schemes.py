"""The schemes of the rollouts: whether this device has them, a run can change them, and they pay. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.plan.engines import (
    CHANGES_ENGINES,
    finer_schemes,
    keeps_experts,
    layers_with_experts,
    quantises_experts,
    why_not_live,
)
from appliance.plan.host import HostFacts
from appliance.preflight.finding import Finding, Severity, error, warning
from appliance.preflight.probes import InputFacts
from appliance.record.plan import RunPlan, Switching
from appliance.terms.devices import CPU, PAYS_FROM, StoredResult, why_not
from appliance.terms.schemes import BLOCK, Scales
from appliance.terms.shapes import ModelShape


def judge_schemes(plan: RunPlan, host: HostFacts) -> Iterator[Finding]:
    mixed = len({replica.scheme for replica in plan.rollout.replicas}) > 1
    place = "rollout.replicas" if mixed else "rollout.scheme"
    for replica in dict.fromkeys(plan.rollout.replicas):
        reason = why_not(replica.scheme, device=plan.device, cpu_flags=host.cpu_flags)
        if replica.emulated:
            message = f"`{replica.scheme}` is emulated by rounding in float: its numbers are meant, its speed is not"
            yield warning("scheme-emulated", "quantization.emulate", message, "use `int8` where speed matters")
        elif reason:
            emulate = ", or quantization.emulate for its numbers alone" if replica.scheme.spec.can_emulate else ""
            yield error("scheme", place, reason, f"use `int8` or `bf16`, or `auto`{emulate}")
        elif plan.device == CPU and (fast := replica.scheme.spec.fast_cpu_flags) and not host.cpu_flags & set(fast):
            number = replica.scheme.spec.number
            message = f"this processor has no VNNI and no AMX: {number} runs, but slower than BF16"
            yield warning("scheme-slow", place, message, "use `auto` or `bf16`")


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
        yield error("guard-blocks", "guard.actions", message, remedy)


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
        yield error("guard-scheme", "guard.scheme_change", message, "set it to `restart`")


_KEEP = r"keep them in BF16: quantization.ignore=['re:.*\.experts$']"


def judge_experts(plan: RunPlan, *, host: HostFacts, shape: ModelShape | None) -> Iterator[Finding]:
    """shape: None where the model is built in, or not known yet. A model of the hub may turn out to have experts."""
    if plan.device == CPU or shape is None or not shape.has_experts:
        return
    flags = host.cpu_flags
    for replica in dict.fromkeys(plan.rollout.replicas):
        scheme = replica.scheme
        runs = replica.emulated or not why_not(scheme, device=plan.device, cpu_flags=flags)
        kept = not scheme.quantised or keeps_experts(replica.ignore, layers=max(1, shape.layers))
        if kept or not runs:  # what does not run at all is said of the scheme
            continue
        why = why_not(scheme, device=plan.device, cpu_flags=flags, experts=True)
        if why and not replica.emulated:
            yield error("experts", "rollout.scheme", f"`{scheme}`: {why}", f"use `bf16`, or {_KEEP}")
        elif not plan.rollout.eager:
            message = (
                f"{plan.model.source} has experts, and quantised ones need engines without CUDA graphs: the plan of a "
                "model that is only a name cannot see it"
            )
            remedy = f"give the model's folder in model.path, or {_KEEP}"
            yield error("experts", "model.path", message, remedy)


# "Worth it from about 14B and long chains of thought": FlashRL's own account and its users' (Liu et al. 2025).
_WEIGHTS_FROM = 14e9
_LONG_RESPONSE = 4096  # tokens; DAPO's are up to 20480, GSM8K's a few hundred
_PLACE = "rollout.scheme"


def judge_gain(plan: RunPlan, *, shape: ModelShape | None, stored: StoredResult | None) -> Iterator[Finding]:
    """shape: None where the model is built in, or not known yet.  stored: what counts for this plan."""
    scheme = plan.rollout.scheme
    if not scheme.quantised or plan.rollout.emulated:
        return
    ratio = dict(stored.ratios).get(scheme) if stored else None
    if stored and ratio is not None:
        slower = ratio < PAYS_FROM
        message = f"{'quantising does not pay here' if slower else 'quantising pays here'}, {stored}"
        severity = Severity.WARNING if slower else Severity.INFO
        yield Finding(severity, "gain", _PLACE, message, "use `bf16`" if slower else "")
        return
    if why := _doubt(plan, shape=shape):
        message = f"`{scheme}` may be no faster than `bf16` here: {why}; not measured on this host"
        yield Finding(Severity.INFO, "gain", _PLACE, message, "`appliance bench RECIPE` measures it, in minutes")


def _doubt(plan: RunPlan, *, shape: ModelShape | None) -> str:
    if plan.model.builtin:
        return "the built-in model's time goes to the sampler and the processes around it"
    reasons = []
    if shape is not None and shape.is_dense and shape.weights < _WEIGHTS_FROM:
        reasons.append(f"the model has {shape.weights / 1e9:.1f} billion weights (gains are reported from 14 on)")
    if plan.task.max_response_tokens < _LONG_RESPONSE:
        reasons.append(f"responses have up to {plan.task.max_response_tokens} tokens (long ones gain)")
    return ", and ".join(reasons)

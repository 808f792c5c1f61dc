"""Does quantising pay here? By what `bench` kept for device, layers and versions; else by what others report."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.plan.model import RunPlan
from appliance.preflight.finding import Finding, Severity
from appliance.terms.devices import PAYS_FROM, StoredResult
from appliance.terms.shapes import ModelShape

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

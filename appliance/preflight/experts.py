"""Quantised experts on a GPU: what nothing serves is said before an engine starts."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.plan.experts import keeps_experts
from appliance.plan.host import HostFacts
from appliance.plan.model import RunPlan
from appliance.preflight.finding import Finding, Severity
from appliance.terms.devices import CPU, why_not
from appliance.terms.shapes import ModelShape

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
            yield Finding(Severity.ERROR, "experts", "rollout.scheme", f"`{scheme}`: {why}", f"use `bf16`, or {_KEEP}")
        elif not plan.rollout.eager:
            message = (
                f"{plan.model.source} has experts, and quantised ones need engines without CUDA graphs: the plan of a "
                "model that is only a name cannot see it"
            )
            remedy = f"give the model's folder in model.path, or {_KEEP}"
            yield Finding(Severity.ERROR, "experts", "model.path", message, remedy)

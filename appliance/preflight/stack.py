"""Are the installed packages those that the plan's patches were made for? Asked without importing them.

A run asks again, in every process, when it applies a patch, and stops there; here it costs nothing and comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from appliance.patch import recorded, why_unfit
from appliance.plan.host import HostFacts
from appliance.preflight.finding import Finding, error
from appliance.record.attestations import version_of
from appliance.record.plan import RunPlan
from appliance.terms.devices import CPU


@dataclass(frozen=True)
class StackFacts:
    """versions: (distribution, what the plan pins, what is installed or empty) where they differ.

    patches: (name, why it cannot be applied) of those that the plan wants to be live.
    """

    versions: tuple[tuple[str, str, str], ...] = ()
    patches: tuple[tuple[str, str], ...] = ()


def read_stack(plan: RunPlan) -> StackFacts:
    installed = [(name, pinned, version_of(name)) for name, pinned in plan.pins]
    wanted = {name for each in plan.attestations for name in each.patches}
    problems = [(name, why_unfit(recorded()[name])) for name in sorted(wanted)]
    return StackFacts(
        versions=tuple(each for each in installed if each[1] != each[2]),
        patches=tuple((name, why) for name, why in problems if why),
    )


def judge_stack(plan: RunPlan, host: HostFacts, facts: StackFacts) -> Iterator[Finding]:
    """Nothing for a GPU's plan where there is none: it would only say that this is another host."""
    if plan.device != CPU and not host.gpus:
        return
    remedy = "install the locked requirements: `make demo` does, or the image" + (
        "" if plan.device == CPU else " of the gpu flavour"
    )
    for name, pinned, installed in facts.versions:
        message = f"{installed or 'nothing'} is installed, the plan is for {pinned}"
        yield error("version", name, message, remedy)
    differ = {name for name, _, _ in facts.versions}
    for name, why in facts.patches if not differ else ():  # another version has other sources: said once
        yield error("patch", f"patch {name}", why, remedy)

"""What a GPU run needs beyond its GPUs: flash attention, heads and widths that divide, memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.plan.engines import CHANGES_ENGINES
from appliance.plan.host import HostFacts
from appliance.plan.memory import GIB, engine_share, gpu_ladder, host_bytes, moments
from appliance.preflight.finding import Finding, Severity, error
from appliance.record.plan import RunPlan
from appliance.terms.devices import CPU
from appliance.terms.shapes import ModelShape

FLASH_PACKAGE = "flash_attn"


def attention(plan: RunPlan, host: HostFacts) -> Iterator[Finding]:
    """Without it verl's sequence parallelism would exchange nothing, and say nothing; packing would not start."""
    if plan.device == CPU or not plan.trainer.packed or FLASH_PACKAGE in host.packages:
        return
    shares = plan.trainer.sequence_parallel > 1
    what = "sharing a sequence over GPUs" if shares else "packing sequences without padding"
    remedy = "use the image's gpu flavour, which brings it"
    if not shares:
        remedy += ", or trainer.attention: sdpa, which pads"
    message = f"`{plan.trainer.attention}` is planned: {what} needs the package flash-attn, which is not installed"
    yield error("flash-attention", "trainer.attention", message, remedy)


def parallel(plan: RunPlan, shape: ModelShape | None) -> Iterator[Finding]:
    """verl checks the heads when its workers have started, vLLM after the weights are loaded."""
    if shape is None or not shape.heads:
        return
    name, sharing = plan.model.source or plan.model.builtin, plan.rollout.tensor_parallel
    for count, what in ((shape.heads, "attention heads"), (shape.intermediate, "columns of the MLP")):
        if count and count % sharing:
            yield _indivisible("rollout.tensor_parallel", sharing, count=count, what=what, name=name)
    if shape.kv_heads and shape.kv_heads % sharing and sharing % shape.kv_heads:
        yield _indivisible("rollout.tensor_parallel", sharing, count=shape.kv_heads, what="KV heads", name=name)
    sharing = plan.trainer.sequence_parallel
    if shape.heads % sharing:
        what = "attention heads"
        yield _indivisible("trainer.sequence_parallel", sharing, count=shape.heads, what=what, name=name)
    if shape.kv_heads and shape.kv_heads % sharing and sharing % shape.kv_heads:
        yield _indivisible("trainer.sequence_parallel", sharing, count=shape.kv_heads, what="KV heads", name=name)


def memory(plan: RunPlan, host: HostFacts, shape: ModelShape | None) -> Iterator[Finding]:
    """An error only where the weights alone are too much; the rest is by rule of thumb."""
    for moment in moments(plan, shape) if shape else ():
        if not moment.short:
            continue
        changes = gpu_ladder(plan, shape)
        what = "weights are updated" if moment.name == "update" else "responses are generated"
        message = f"{moment.short / GIB:.1f} GiB are missing on each GPU while {what}: {moment.text}"
        remedy = f"by the same estimate it fits with {'; '.join(changes)}" if changes else "take more or larger GPUs"
        severity = Severity.ERROR if moment.certainly_short else Severity.WARNING
        yield Finding(severity, "gpu-memory", "cluster.device", message, remedy)
    if shape:
        yield from _engine(plan, shape)
    yield from offloaded(plan, host, shape)


def offloaded(plan: RunPlan, host: HostFacts, shape: ModelShape | None) -> Iterator[Finding]:
    """The trainer's state that lies in each host's own memory."""
    needed = host_bytes(plan, shape) if shape and moments(plan, shape) else 0
    if host.gpus and needed > host.memory_bytes:
        has = host.memory_bytes / GIB
        message = f"{needed / GIB:.0f} GiB of the trainer's state are offloaded, this host has {has:.0f}"
        remedy = "do not offload, or use more hosts"
        yield error("host-memory", "trainer.offload_optimizer", message, remedy)


def _engine(plan: RunPlan, shape: ModelShape) -> Iterator[Finding]:
    """Its share, for the scheme that is planned or reserved; and for BF16, which the run may come to without either."""
    place, planned = "rollout.gpu_memory_utilization", engine_share(plan, shape)
    if planned is None:
        return
    if planned.short:
        severity = Severity.ERROR if planned.certainly_short else Severity.WARNING
        message = f"an engine needs more than its share: {planned.text}"
        yield Finding(severity, "engine-memory", place, message, "raise it, or rollout.tensor_parallel")
        return
    actions = [each for each in CHANGES_ENGINES if each in plan.guard.actions]
    validates = bool(plan.validate_bf16_every)
    in_bf16 = engine_share(plan.replace(guard=plan.guard.replace(reserve_bf16=True)), shape)
    if in_bf16 is None or not in_bf16.short or not (validates or actions):
        return
    wholly = validates or plan.guard.comes_to_bf16
    severity = Severity.ERROR if wholly and in_bf16.certainly_short else Severity.WARNING
    message = f"rollouts in BF16, which this run may come to, need more than the engine's share: {in_bf16.text}"
    without = [f"leave {' and '.join(f'`{each}`' for each in actions)} out of guard.actions"] if actions else []
    without += ["set trainer.validate_bf16_every to 0"] if validates else []
    remedy = f"raise {place} or rollout.tensor_parallel, or {' and '.join(without)}"
    yield Finding(severity, "engine-memory", "guard.reserve_bf16", message, remedy)


def _indivisible(place: str, sharing: int, *, count: int, what: str, name: str) -> Finding:
    message = f"{sharing} does not divide the {count} {what} of {name}"
    return error("heads", place, message, "use a divisor")

"""What a plan asks of its device: schemes, experts, kernels, heads, memory; and whether it pays there. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from appliance.finding import Finding, Severity, error, warning
from appliance.plan.engines import (
    CHANGES_ENGINES,
    finer_schemes,
    keeps_experts,
    layers_with_experts,
    quantises_experts,
    why_not_live,
)
from appliance.plan.host import HostFacts
from appliance.plan.memory import GIB, engine_share, gpu_ladder, host_bytes, is_estimated, moments
from appliance.plan.rules import faults_of_experts
from appliance.record.plan import RunPlan
from appliance.settings.sections import Attention, SchemeChange
from appliance.terms.devices import PAYS_FROM, StoredResult, why_not
from appliance.terms.families import FAMILIES
from appliance.terms.schemes import BLOCK, Scales, why_no_groups
from appliance.terms.settings import KvCache
from appliance.terms.shapes import ModelShape

FLASH, FLASH_PACKAGE = Attention.FLASH_ATTENTION_2, "flash_attn"
_KEEP = r"keep them in BF16: quantization.ignore=['re:.*\.experts$']"
# "Worth it from about 14B and long chains of thought": FlashRL's own account and its users' (Liu et al. 2025).
_WEIGHTS_FROM = 14e9
_LONG_RESPONSE = 4096  # tokens; DAPO's are up to 20480, GSM8K's a few hundred
CPU_HEAD_SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # that vLLM's attention on a CPU is made for
CPU_FP8_HEADS = 32  # widths of heads are multiples of it where vLLM's attention on a CPU has keys and values in FP8


def judge_gpus(plan: RunPlan, host: HostFacts) -> Iterator[Finding]:
    if plan.is_cpu:
        return
    remedy = f"run it on a host with {plan.cluster.gpus_per_node} x `{plan.cluster.device}`"
    remedy += ", or try `--set cluster.device=cpu`" if plan.topology.gpus == 1 else ""
    if not host.gpus:
        if host.container is not None:  # judge_container names the flag
            return
        yield error("no-gpu", "cluster.device", f"`{plan.cluster.device}` is wanted, this host has no GPU", remedy)
    elif len(host.gpus_of(plan.cluster.device)) < plan.cluster.gpus_per_node:
        have = ", ".join(gpu.product for gpu in host.gpus)
        message = f"{plan.cluster.gpus_per_node} x `{plan.cluster.device}` wanted, this host has {have}"
        yield error("wrong-gpu", "cluster.device", message, remedy)


def judge_attention(plan: RunPlan, host: HostFacts) -> Iterator[Finding]:
    if plan.trainer.attention is FLASH and FLASH_PACKAGE not in host.packages:
        message = f"`{FLASH}` needs the package flash-attn, which is not installed"
        yield error("flash-attention", "trainer.attention", message, "remove it: `auto` needs no package")


def judge_parallel(plan: RunPlan, shape: ModelShape | None) -> Iterator[Finding]:
    """Check that heads and columns can be shared by ranks: verl checks the heads when its workers have started, vLLM
    after the weights are loaded, or at its first token."""
    if shape is None or not shape.heads:
        return
    model = plan.model.given_name
    if plan.is_cpu and shape.head_size not in (0, *CPU_HEAD_SIZES):
        message = (
            f"the attention heads of {model} are {shape.head_size} wide, and vLLM on a CPU cannot compute with them"
        )
        yield error("heads", "model.path", message, f"use a model with one of {', '.join(map(str, CPU_HEAD_SIZES))}")
    heads, columns = (shape.heads, "attention heads", False), (shape.intermediate, "columns of the MLP", False)
    kv_heads = (shape.kv_heads, "KV heads", True)  # that several ranks may have a copy of
    for place, sharing, divided in (
        ("rollout.tensor_parallel", plan.rollout.tensor_parallel, (heads, columns, kv_heads)),
        ("trainer.sequence_parallel", plan.trainer.sequence_parallel, (heads, kv_heads)),
    ):
        for count, noun, may_repeat in divided:
            if count % sharing and not (may_repeat and sharing % count == 0):
                message = f"{sharing} does not divide the {count} {noun} of {model}"
                yield error("heads", place, message, "use a divisor")


def judge_kv_cache(plan: RunPlan, host: HostFacts, shape: ModelShape | None) -> Iterator[Finding]:
    """Check that vLLM's attention on a CPU has a KV cache in FP8 for this processor and this model."""
    if not plan.is_cpu or plan.rollout.kv_cache is not KvCache.FP8:
        return
    if "avx512f" not in host.cpu_flags:
        message = "`fp8` needs a processor with AVX-512, which this one does not have"
        yield error("kv-cache", "rollout.kv_cache", message, "use `auto`")
    if shape is not None and shape.head_size % CPU_FP8_HEADS:
        message = (
            f"the attention heads of {plan.model.given_name} are {shape.head_size} wide, and on a CPU `fp8` needs a"
        )
        yield error("kv-cache", "rollout.kv_cache", f"{message} multiple of {CPU_FP8_HEADS}", "use `auto`")


_WHILE = {
    "rollout": "responses are generated",
    "update": "weights are updated",
    "sync": "weights are sent",
    "save": "a checkpoint is saved",
}


def judge_gpu_memory(plan: RunPlan, host: HostFacts, shape: ModelShape | None) -> Iterator[Finding]:
    """Judge the memory of the GPUs at the worst moment. Only where the weights alone are too much is it an error; the
    rest is by rule of thumb."""
    short = [moment for moment in moments(plan, shape) if moment.short] if shape else []
    if shape and short:
        moment = max(short, key=lambda each: (each.certainly_short, each.short))
        changes = gpu_ladder(plan, shape)
        message = f"{moment.short / GIB:.1f} GiB are missing on each GPU while {_WHILE[moment.name]}: {moment.text}"
        remedy = f"by the same estimate it fits with {'; '.join(changes)}" if changes else "take more or larger GPUs"
        severity = Severity.ERROR if moment.certainly_short else Severity.WARNING
        yield Finding(severity, "gpu-memory", ("cluster.device",), message, remedy)
    if shape:
        yield from _engine(plan, shape)
    yield from judge_offloaded_state(plan, host, shape)


def judge_offloaded_state(plan: RunPlan, host: HostFacts, shape: ModelShape | None) -> Iterator[Finding]:
    """Judge the trainer's state that lies in each host's own memory."""
    needed = host_bytes(plan, shape) if shape and is_estimated(plan, shape) else 0
    if host.gpus and needed > host.memory_bytes:
        has = host.memory_bytes / GIB
        message = f"{needed / GIB:.0f} GiB of the trainer's state are offloaded, this host has {has:.0f}"
        remedy = "do not offload, or use more hosts"
        yield error("host-memory", "trainer.offload_optimizer", message, remedy)


def _engine(plan: RunPlan, shape: ModelShape) -> Iterator[Finding]:
    """Judge an engine's share of the memory: for the planned or reserved scheme, and for BF16, where a run may end."""
    place, planned = "rollout.gpu_memory_utilization", engine_share(plan, shape)
    if planned is None:
        return
    if planned.short:
        severity = Severity.ERROR if planned.certainly_short else Severity.WARNING
        message = f"an engine needs more than its share: {planned.text}"
        yield Finding(severity, "engine-memory", (place,), message, "raise it, or rollout.tensor_parallel")
        return
    actions = [each for each in CHANGES_ENGINES if each in plan.guard.actions]
    validates = bool(plan.trainer.validate_bf16_every)
    in_bf16 = engine_share(plan.replace(guard=plan.guard.replace(reserve_bf16=True)), shape)
    if in_bf16 is None or not in_bf16.short or not (validates or actions):
        return
    wholly = validates or plan.guard.comes_to_bf16
    severity = Severity.ERROR if wholly and in_bf16.certainly_short else Severity.WARNING
    message = f"rollouts in BF16, which this run may come to, need more than the engine's share: {in_bf16.text}"
    without = [f"leave {' and '.join(f'`{each}`' for each in actions)} out of guard.actions"] if actions else []
    without += ["set trainer.validate_bf16_every to 0"] if validates else []
    remedy = f"raise {place} or rollout.tensor_parallel, or {' and '.join(without)}"
    yield Finding(severity, "engine-memory", ("guard.reserve_bf16",), message, remedy)


def judge_planned_schemes(plan: RunPlan, host: HostFacts) -> Iterator[Finding]:
    mixed = len(set(plan.rollout.replicas)) > 1
    place = "rollout.replicas" if mixed else "rollout.scheme"
    for replica in dict.fromkeys(plan.engines):
        reason = why_not(replica.scheme, device=plan.cluster.device, cpu_flags=host.cpu_flags)
        if replica.emulated:
            emulated = "is emulated by rounding in float: its numbers are right, its speed says nothing"
            message = f"`{replica.scheme}` {emulated}"
            yield warning("scheme-emulated", "quantization.emulate", message, "use `int8` where speed matters")
        elif reason:
            emulate = ", or quantization.emulate for its numbers alone" if replica.scheme.spec.can_emulate else ""
            yield error("scheme", place, reason, f"use `int8` or `bf16`, or `auto`{emulate}")
        elif plan.is_cpu and (fast := replica.scheme.spec.fast_cpu_flags) and not host.cpu_flags & set(fast):
            number = replica.scheme.spec.number
            message = f"this processor has none of {', '.join(fast)}: {number} runs, no faster than BF16"
            yield warning("scheme-slow", place, message, "use `auto` or `bf16`")


def judge_scale_groups(plan: RunPlan, shape: ModelShape | None) -> Iterator[Finding]:
    """Find layers that a scheme with scales of groups cannot quantise. Where `ignore` keeps some layers in BF16, the
    engine decides."""
    scheme = next((scheme for scheme in plan.rollout.replicas if scheme.spec.scales is Scales.GROUP), None)
    if scheme is None or shape is None or plan.quantization.ignore:
        return
    ranks = plan.rollout.tensor_parallel
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    width = shape.expert_intermediate or shape.intermediate
    layers = {
        "qkv_proj": ((queries + 2 * keys) // ranks, shape.hidden),
        "o_proj": (shape.hidden, queries // ranks),
        "gate_up_proj": (2 * width // ranks, shape.hidden),
        "down_proj": (shape.hidden, width // ranks),
    }
    reasons = [f"{name} is {why}" for name, sizes in layers.items() if all(sizes) and (why := why_no_groups(*sizes))]
    if reasons:
        remedy = "name the layer in quantization.ignore, or use `int8`"
        yield error("groups", "rollout.scheme", f"`{scheme}`: {reasons[0]}", remedy)


def judge_guard(plan: RunPlan, shape: ModelShape | None) -> Iterator[Finding]:
    yield from _live(plan, shape)
    yield from _finer(plan, shape)


def _finer(plan: RunPlan, shape: ModelShape | None) -> Iterator[Finding]:
    """vLLM refuses merged layers whose blocks are cut; our emulation only where ranks cut them."""
    ranks = plan.rollout.tensor_parallel
    in_blocks = [scheme for scheme in finer_schemes(plan) if scheme.spec.scales is Scales.BLOCK]
    if shape is None or not in_blocks or (plan.emulates and ranks == 1):
        return
    widths = (shape.heads * shape.head_size, max(shape.kv_heads, ranks) * shape.head_size, shape.intermediate)
    ragged = [width // ranks for width in widths if width // ranks % BLOCK]
    if ragged:
        cut = f"whose blocks cut the {ragged[0]} channels of a layer's part"
        message = f"`raise-precision` ends with `{in_blocks[-1]}`, {cut}"
        remedy = "leave it out of guard.actions, or use other values of rollout.scheme or rollout.tensor_parallel"
        yield error("guard-blocks", "guard.actions", message, remedy)


def _live(plan: RunPlan, shape: ModelShape | None) -> Iterator[Finding]:
    """Judge the live change of precision: a model of the hub may turn out to have experts only here."""
    changes = plan.trainer.validate_bf16_every or any(action in CHANGES_ENGINES for action in plan.guard.actions)
    if not changes or plan.guard.scheme_change is SchemeChange.RESTART or not plan.rollout.scheme.quantised:
        return
    layers = max(1, shape.layers) if shape and shape.has_experts else layers_with_experts(plan.weights)
    prevents = why_not_live(
        plan.rollout,
        plan.quantization,
        eager=plan.engine.eager,
        actions=plan.guard.actions,
        is_cpu=plan.is_cpu,
        experts=quantises_experts(plan.quantization.ignore, layers=layers),
    )
    if prevents:
        message = f"a change of scheme cannot be `live`: {prevents}"
        yield error("guard-scheme", "guard.scheme_change", message, "set it to `restart`")


def judge_experts(plan: RunPlan, *, host: HostFacts, shape: ModelShape | None) -> Iterator[Finding]:
    """Judge the experts of a model. shape: None where the model is built in, or not known yet. A model of the hub may
    turn out to have experts."""
    if shape is None or not shape.has_experts:
        return
    if not layers_with_experts(plan.weights):  # of those that the plan could see plan/rules.py tells
        yield from (replace(finding, code="experts") for finding in faults_of_experts(plan))
    if plan.is_cpu:
        return
    flags = host.cpu_flags
    for replica in dict.fromkeys(plan.engines):
        scheme = replica.scheme
        runs = replica.emulated or not why_not(scheme, device=plan.cluster.device, cpu_flags=flags)
        kept = not scheme.quantised or keeps_experts(replica.ignore, layers=max(1, shape.layers))
        if kept or not runs:  # what does not run at all is said of the scheme
            continue
        why = why_not(scheme, device=plan.cluster.device, cpu_flags=flags, experts=True)
        if why and not replica.emulated:
            yield error("experts", "rollout.scheme", f"`{scheme}`: {why}", f"use `bf16`, or {_KEEP}")
        elif not plan.engine.eager:
            message = (
                f"{plan.model.given_name} has experts, and quantised ones need engines without CUDA graphs: from a "
                "name alone the plan cannot see that"
            )
            remedy = f"give the model's folder in model.path, or {_KEEP}"
            yield error("experts", "model.path", message, remedy)


def judge_gain(
    plan: RunPlan, *, host: HostFacts, shape: ModelShape | None, stored: StoredResult | None
) -> Iterator[Finding]:
    """Judge whether quantising makes rollouts faster. shape: None where it is not known yet.  stored: the result of
    `bench` that counts for this plan."""
    scheme = plan.rollout.scheme
    if not scheme.quantised or plan.emulates:
        return
    ratio = dict(stored.ratios).get(scheme) if stored else None
    if stored and ratio is not None:
        slower = ratio < PAYS_FROM
        message = f"{'quantising does not pay here' if slower else 'quantising pays here'}, {stored}"
        severity = Severity.WARNING if slower else Severity.INFO
        yield Finding(severity, "gain", ("rollout.scheme",), message, "use `bf16`" if slower else "")
        return
    if why := _doubt(plan, host=host, shape=shape):
        message = f"`{scheme}` may be no faster than `bf16` here: {why}; not measured on this host"
        yield Finding(
            Severity.INFO, "gain", ("rollout.scheme",), message, "`appliance bench RECIPE` measures it, in minutes"
        )


def judge_one_flow(plan: RunPlan, *, shape: ModelShape | None) -> Iterator[Finding]:
    """Find what the rollouts' forward does not compute, where the trainer uses it. shape: as for `judge_gain`."""
    if plan.trainer.one_flow and shape and (why := shape.beyond_one_flow or _other_forward(shape)):
        message = f"`rollout` does not know {why}, which {plan.model.given_name} asks for"
        yield error("forward", "trainer.forward", message, "use `bf16`")


def _other_forward(shape: ModelShape) -> str:
    """Name a class whose forward is not known to be Llama's, or an empty text. The plan refuses experts."""
    rows = {name: FAMILIES.get(name) for name in shape.architectures}
    return next((name for name, row in rows.items() if row is None or not (row.one_flow or row.mixture)), "")


def _doubt(plan: RunPlan, *, host: HostFacts, shape: ModelShape | None) -> str:
    """Say why quantising may not pay; empty where nothing speaks against it. What others report is of GPUs. On a CPU
    with VNNI and without AMX INT8 paid with 0.1 billion weights and 16 tokens (docs/results/rollouts.md); with AMX
    rollouts of that model gained nothing, layers of a 7B did (docs/results/bench-7b.md). One flow leaves out AMX."""
    if shape is not None and shape.is_tiny:
        return f"with {shape.millions} the time goes to the sampler and the processes around it"
    if plan.is_cpu and plan.rollout.scheme.spec.scales is Scales.GROUP:  # of weights alone: activations are in BF16
        return "on a CPU it saves memory and no time"
    if plan.is_cpu:
        has_amx = "amx_bf16" in host.cpu_flags and not plan.trainer.one_flow
        return "this processor has AMX, with which BF16 is fast as well" if has_amx else ""
    reasons = []
    if shape is not None and shape.is_dense and shape.weights < _WEIGHTS_FROM:
        size = f"{shape.weights / 1e9:.1f} billion weights"
        reasons.append(f"the model has {size} (others report gains from {_WEIGHTS_FROM / 1e9:g} billion on)")
    if plan.task.max_response_tokens < _LONG_RESPONSE:
        reasons.append(f"responses have up to {plan.task.max_response_tokens} tokens (long ones gain)")
    return ", and ".join(reasons)

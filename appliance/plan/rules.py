"""What is wrong with a recipe on the model and the device that it is planned for: rules that need the plan. Pure but
for the model's config.json. The rules that need nothing but the recipe are in recipe/rules.py, those that need this
host in preflight/."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

from appliance.finding import Finding, fault
from appliance.guard.policy import Action
from appliance.plan.derive import why_a_pass
from appliance.plan.engines import layers_with_experts
from appliance.plan.host import HostFacts
from appliance.plan.model_source import hub_name
from appliance.recipe.rules import RULES as OF_RECIPE
from appliance.recipe.rules import Needs, Rule, judge, scheme_key
from appliance.recipe.schema import Recipe
from appliance.record.plan import RunPlan
from appliance.settings.sections import Attention, Backward, Forward, Quantization
from appliance.terms.devices import AUTO, CPU, DEVICES, GPUS, gpu_of_product
from appliance.terms.schemes import PROFILED, Scheme, listed
from appliance.terms.settings import Dtype, KvCache, OldLogProbs

HOPPER = 9  # the major number of its capability: what torch multiplies in blocks of 128
_BF16 = "use `bf16`"


def judge_plan(recipe: Recipe, plan: RunPlan, *, host: HostFacts, least: Needs = Needs.RECIPE) -> list[Finding]:
    """Return every fault of the recipe that it and its plan show, each with the place where the user wrote it. host:
    that the plan was made for.  least: rules that need less are left out."""
    return judge([rule for rule in RULES if rule.needs >= least], recipe, plan, host)


def knows_device(recipe: Recipe, host: HostFacts) -> bool:
    """Tell whether the plan is for the device that the recipe means; else it is for another one (build.py), of which
    nothing needs to be reported."""
    return recipe.cluster.device in (AUTO, *DEVICES) and not unknown_gpu(recipe, host)


def unknown_gpu(recipe: Recipe, host: HostFacts) -> str:
    """Return the product name of the GPU that `cluster.device: auto` finds on the host and does not know; else
    empty."""
    if recipe.cluster.device != AUTO or not host.gpus or gpu_of_product(host.gpus[0].product):
        return ""
    return host.gpus[0].product


def _unknown_gpu(recipe: Recipe, plan: RunPlan, host: HostFacts) -> Iterator[Finding]:
    if product := unknown_gpu(recipe, host):
        message = f"`auto` found `{product}`, which this version does not know"
        hint = "name the most similar GPU in cluster.device, or `cpu`"
        yield fault(("cluster.device",), message, hint, is_of_no_value=True)


def _revision(recipe: Recipe, plan: RunPlan) -> Iterator[Finding]:
    if recipe.model.revision and recipe.model.path and not hub_name(recipe):
        message = f"{recipe.model.path} is not a model on the hub"
        yield fault(("model.revision", "model.path"), message, "leave it out")


def _on_cpu(recipe: Recipe, plan: RunPlan) -> Iterator[Finding]:
    """Report settings that a CPU cannot carry out."""
    if not plan.is_cpu:
        return
    if recipe.trainer.attention is Attention.FLASH_ATTENTION_2:
        yield fault(("trainer.attention", "cluster.device"), "`flash_attention_2` needs a GPU", "use `auto`")
    for key in ("offload_parameters", "offload_optimizer"):
        if getattr(recipe.trainer, key):
            message = "on a CPU everything is in the host's memory already"
            yield fault((f"trainer.{key}", "cluster.device"), message, "remove it, or set it to false")


def _kv_cache(recipe: Recipe, plan: RunPlan) -> Iterator[Finding]:
    """Refuse a KV cache in FP8 where no kernel has it. Preflight asks for the processor's and the model's part."""
    device = plan.cluster.device
    if plan.rollout.kv_cache is KvCache.FP8 and not plan.is_cpu and not GPUS[device].has_fp8:
        keys = ("rollout.kv_cache", "cluster.device")
        yield fault(keys, f"`fp8` needs a GPU that computes in FP8, and {device} does not", "use `auto`")


def _old_log_probs(recipe: Recipe, plan: RunPlan) -> Iterator[Finding]:
    """Report an update that cannot give the old log-probs, though the recipe wants them from it."""
    if recipe.trainer.old_log_probs is not OldLogProbs.UPDATE or plan.trainer.old_log_probs is OldLogProbs.UPDATE:
        return
    reason = why_a_pass(recipe, is_cpu=plan.is_cpu) or "the engines' are the trainer's own in one flow"
    yield fault(("trainer.old_log_probs",), f"`update` cannot give them: {reason}", "use `auto`")


def _without_profile(recipe: Recipe, plan: RunPlan) -> Iterator[Finding]:
    """Report settings that only a profile carries out, where none is made."""
    quantised = [scheme for scheme in plan.rollout.replicas if scheme.quantised]
    if recipe.quantization.profile != AUTO or not quantised or any(scheme in PROFILED for scheme in quantised):
        return
    for key in ("smoothing", "mismatch_budget"):
        value = getattr(recipe.quantization, key)
        if value and value != Quantization.model_fields[key].default:
            message = f"it is a setting of profiles, and none is made for `{quantised[0]}`"
            hint = f"remove it, or use {listed(PROFILED)}"
            keys = (f"quantization.{key}", scheme_key(recipe), *_chosen_by(recipe, quantised[0]))
            yield fault(keys, message, hint)


def _chosen_by(recipe: Recipe, scheme: Scheme) -> tuple[str, ...]:
    """Return the key by which a scheme is chosen that is not named; none for one that is."""
    schemes = recipe.rollout.schemes
    return ("cluster.device",) if AUTO in schemes and scheme not in schemes else ()


def _automatic_scheme(recipe: Recipe, plan: RunPlan) -> Iterator[Finding]:
    """Refuse FP16 with a scheme that `auto` has found and that has none; one that is named is judged without a plan."""
    asked, schemes = recipe.rollout.schemes, plan.rollout.replicas
    for scheme in dict.fromkeys(scheme for scheme, choice in zip(schemes, cycle(asked)) if choice == AUTO):
        if recipe.trainer.dtype is Dtype.FP16 and not scheme.spec.in_fp16:
            message = f"`auto` is `{scheme}` on {plan.cluster.device}, which engines have in BF16 alone"
            keys = (scheme_key(recipe), "trainer.dtype", "cluster.device")
            yield fault(keys, message, "use `int8`, or `bf16`, or trainer.dtype: bf16")


def _forward(recipe: Recipe, plan: RunPlan) -> Iterator[Finding]:
    """Report the device and the scheme on which the trainer cannot compute as the rollouts do."""
    forward, scheme, key = recipe.trainer.forward, plan.rollout.scheme, ("trainer.forward", "cluster.device")
    if forward is Forward.BF16:
        return
    if other := next((scheme for scheme in plan.rollout.replicas if not forward.knows(scheme)), None):
        keys = ("trainer.forward", scheme_key(recipe), *_chosen_by(recipe, other))
        yield fault(keys, f"`{forward}` does not know `{other}`", "use rollout.scheme: int8")
    if not plan.is_cpu and forward is not Forward.ROLLOUT:
        yield fault(key, f"`{forward}` runs on a CPU only", _BF16)
        return
    if plan.trains_on_codes and plan.topology.gpus > 1:
        keys = ("trainer.forward", "model.lora.sync", "cluster.gpus_per_node", "cluster.nodes")
        message = f"with an adapter that is sent alone `{forward}` has one rank of the trainer"
        yield fault(keys, f"{message}, and here are {plan.topology.gpus}", "use one, or trainer.forward: bf16")
    if not plan.is_cpu and plan.rollout.leaves_words_out:
        name, usual = ("rollout.top_p", "1.0") if plan.rollout.top_p < 1 else ("rollout.top_k", "0")
        message = f"with `{forward}` engines on a GPU do not report which words a token was drawn from"
        yield fault((name, "trainer.forward"), message, f"use {usual}, or trainer.forward: bf16")
    if not plan.is_cpu and plan.emulates:
        yield fault(key, f"`{forward}` emulates FP8 on a CPU only", "remove quantization.emulate")
    if scheme is Scheme.FP8_BLOCK and not _has_block_kernel(plan.cluster.device):
        yield fault(key, f"`{forward}` has a kernel of `fp8-block` on Hopper only", _BF16)


def _backward(recipe: Recipe, plan: RunPlan) -> Iterator[Finding]:
    """Report the device and the schemes on which gradients cannot be computed as the recipe wants."""
    if recipe.trainer.backward is not Backward.FP8_BLOCK:
        return
    if other := next((scheme for scheme in plan.rollout.replicas if scheme is not Scheme.FP8_BLOCK), None):
        message = "`fp8-block` needs rollouts in `fp8-block`"
        keys = ("trainer.backward", scheme_key(recipe), *_chosen_by(recipe, other))
        yield fault(keys, message, "use rollout.scheme: fp8-block, or backward: bf16")
    elif recipe.trainer.forward is Forward.ROLLOUT and not _has_block_kernel(plan.cluster.device):
        yield fault(("trainer.backward", "cluster.device"), "`fp8-block` has a kernel on Hopper only", _BF16)


def _finer_schemes(recipe: Recipe, plan: RunPlan) -> Iterator[Finding]:
    """Report schemes that the governor may lead to and the trainer's forward cannot compute."""
    forward = recipe.trainer.forward
    if forward is Forward.BF16 or Action.RAISE_PRECISION not in plan.guard.actions:
        return
    for scheme in plan.rollout.scheme.spec.finer:
        has_kernel = scheme is not Scheme.FP8_BLOCK or _has_block_kernel(plan.cluster.device)
        if not (has_kernel and forward.knows(scheme)):
            message = f"`raise-precision` leads to `{scheme}`, which `{forward}` cannot compute here"
            remedy = "leave it out, or use trainer.forward: bf16"
            yield fault(("guard.actions", "trainer.forward", "cluster.device"), message, remedy)


def _has_block_kernel(device: str) -> bool:
    """Tell whether the forward of `fp8-block` runs there: torch has its kernel for Hopper, and we have one for CPUs."""
    return device == CPU or GPUS[device].capability[0] == HOPPER


def _experts(recipe: Recipe, plan: RunPlan) -> Iterator[Finding]:
    if layers_with_experts(plan.weights):
        yield from faults_of_experts(plan)


def faults_of_experts(plan: RunPlan) -> Iterator[Finding]:
    """Yield the settings that a model with experts does not support. Preflight asks again when it has seen the
    config.json of a model on the hub."""
    if plan.model.lora:
        yield fault(("model.lora",), "this model has experts, whose weights are no linear layers", "set it to null")
    if plan.trainer.dtype is Dtype.FP16:
        yield fault(("trainer.dtype",), "engines have experts in BF16 alone", _BF16)
    if plan.trainer.quantises:
        yield fault(("trainer.forward",), f"`{plan.trainer.forward}` does not know experts", _BF16)


RULES = (
    *OF_RECIPE,
    Rule(_unknown_gpu, Needs.HOST),
    *(
        Rule(check, Needs.PLAN)
        for check in (
            *(_revision, _on_cpu, _kv_cache, _old_log_probs, _without_profile, _automatic_scheme, _forward, _backward),
            *(_finer_schemes, _experts),
        )
    ),
)
"""Rules of the recipe, and those that need its plan."""

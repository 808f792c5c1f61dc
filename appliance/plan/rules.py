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
from appliance.recipe.rules import broken_on_cpu, broken_without_profile
from appliance.recipe.schema import Recipe
from appliance.record.plan import RunPlan
from appliance.settings.sections import Backward, Forward
from appliance.terms.devices import AUTO, CPU, GPUS, gpu_of_product
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Dtype, OldLogProbs

HOPPER = 9  # the major number of its capability: what torch multiplies in blocks of 128
_BF16 = "use `bf16`"


def judge_plan(recipe: Recipe, plan: RunPlan, *, host: HostFacts) -> list[Finding]:
    """Return every fault of the recipe that its plan shows, each with the place where the user wrote it. recipe: one
    that breaks no rule of recipe/rules.py.  host: that the plan was made for."""
    # An unknown GPU has another one in its place in the plan, whose kernels say nothing of it.
    of_the_device = (_automatic_scheme, _forward, _finer_schemes) if not unknown_gpu(recipe, host) else ()
    findings = [
        *_unknown_gpu(recipe, host),
        *_revision(recipe),
        *_automatic_device(recipe, plan),
        *_old_log_probs(recipe, plan),
        *(finding for rule in of_the_device for finding in rule(recipe, plan)),
        *(faults_of_experts(plan) if layers_with_experts(plan.weights) else ()),
    ]
    return [recipe.placed(finding) for finding in findings]


def unknown_gpu(recipe: Recipe, host: HostFacts) -> str:
    """Return the product name of the GPU that `cluster.device: auto` finds on the host and does not know; else
    empty."""
    if recipe.cluster.device != AUTO or not host.gpus or gpu_of_product(host.gpus[0].product):
        return ""
    return host.gpus[0].product


def _unknown_gpu(recipe: Recipe, host: HostFacts) -> Iterator[Finding]:
    if product := unknown_gpu(recipe, host):
        message = f"`auto` found `{product}`, which this version does not know"
        yield fault(("cluster.device",), message, "name the most similar GPU in cluster.device, or `cpu`")


def _revision(recipe: Recipe) -> Iterator[Finding]:
    if recipe.model.revision and not hub_name(recipe):
        message = f"{recipe.model.path} is not a model on the hub"
        yield fault(("model.revision", "model.path"), message, "leave it out")


def _automatic_device(recipe: Recipe, plan: RunPlan) -> Iterator[Finding]:
    if recipe.cluster.device == AUTO and plan.is_cpu:  # a device that is named is judged without a plan
        yield from broken_on_cpu(recipe)


def _old_log_probs(recipe: Recipe, plan: RunPlan) -> Iterator[Finding]:
    """An update that cannot give the old log-probs, though the recipe wants them from it."""
    if recipe.trainer.old_log_probs is not OldLogProbs.UPDATE or plan.trainer.old_log_probs is OldLogProbs.UPDATE:
        return
    reason = why_a_pass(recipe, is_cpu=plan.is_cpu) or "the engines' are the trainer's own in one flow"
    yield fault(("trainer.old_log_probs",), f"`update` cannot give them: {reason}", "use `auto`")


def _automatic_scheme(recipe: Recipe, plan: RunPlan) -> Iterator[Finding]:
    """What `rollout.scheme: auto` has found does not go with; a scheme that is named is judged without a plan."""
    asked, schemes = recipe.rollout.schemes, plan.rollout.replicas
    if AUTO not in asked:
        return
    yield from broken_without_profile(recipe, schemes=schemes)
    automatic = {scheme for scheme, choice in zip(schemes, cycle(asked)) if choice == AUTO}
    for scheme in automatic:
        if recipe.trainer.dtype is Dtype.FP16 and not scheme.spec.in_fp16:
            message = f"`auto` is `{scheme}` on {plan.cluster.device}, which engines have in BF16 alone"
            keys = ("rollout.replicas" if recipe.rollout.replicas else "rollout.scheme", "trainer.dtype")
            yield fault(keys, message, "use `int8`, or `bf16`, or trainer.dtype: bf16")


def _forward(recipe: Recipe, plan: RunPlan) -> Iterator[Finding]:
    """The device and the scheme on which the trainer cannot compute as the rollouts do."""
    forward, scheme, key = recipe.trainer.forward, plan.rollout.scheme, ("trainer.forward", "cluster.device")
    in_fp8 = recipe.trainer.backward is Backward.FP8_BLOCK
    if forward is Forward.BF16:
        return
    if not plan.is_cpu and forward is not Forward.ROLLOUT:
        yield fault(key, f"`{forward}` runs on a CPU only", _BF16)
        return
    if not plan.is_cpu and plan.rollout.leaves_words_out:
        name, usual = ("rollout.top_p", "1.0") if plan.rollout.top_p < 1 else ("rollout.top_k", "0")
        message = f"with `{forward}` engines on a GPU do not report which words a token was drawn from"
        yield fault((name, "trainer.forward"), message, f"use {usual}, or trainer.forward: bf16")
    if not plan.is_cpu and plan.emulates:
        yield fault(key, f"`{forward}` emulates FP8 on a CPU only", "remove quantization.emulate")
    if scheme is Scheme.FP8_BLOCK and not _has_block_kernel(plan.cluster.device):
        yield fault(key, f"`{forward}` has a kernel of `fp8-block` on Hopper only", _BF16)
        if in_fp8:
            yield fault(("trainer.backward", "cluster.device"), "`fp8-block` has a kernel on Hopper only", _BF16)
    elif not forward.knows(scheme):
        keys = ("trainer.forward", "rollout.scheme")
        yield fault(keys, f"`{forward}` does not know `{scheme}`", "use rollout.scheme: int8")
    elif in_fp8 and scheme is not Scheme.FP8_BLOCK:
        keys = ("trainer.backward", "rollout.scheme")
        yield fault(keys, f"`fp8-block` does not know `{scheme}`", "use rollout.scheme: fp8-block")


def _finer_schemes(recipe: Recipe, plan: RunPlan) -> Iterator[Finding]:
    """Schemes that the governor may lead to and the trainer's forward cannot compute."""
    forward = recipe.trainer.forward
    if forward is Forward.BF16 or Action.RAISE_PRECISION not in plan.guard.actions:
        return
    for scheme in plan.rollout.scheme.spec.finer:
        has_kernel = scheme is not Scheme.FP8_BLOCK or _has_block_kernel(plan.cluster.device)
        if not (has_kernel and forward.knows(scheme)):
            message = f"`raise-precision` leads to `{scheme}`, which `{forward}` cannot compute here"
            remedy = "leave it out, or use trainer.forward: bf16"
            yield fault(("guard.actions", "trainer.forward"), message, remedy)


def _has_block_kernel(device: str) -> bool:
    """Whether the forward of `fp8-block` runs there: torch has its kernel for Hopper, and we have one for CPUs."""
    return device == CPU or GPUS[device].capability[0] == HOPPER


def faults_of_experts(plan: RunPlan) -> Iterator[Finding]:
    """Yield the settings that a model with experts does not support. Preflight asks again when it has seen the
    config.json of a model on the hub."""
    if plan.model.lora:
        yield fault(("model.lora",), "this model has experts, whose weights are no linear layers", "set it to null")
    if plan.trainer.dtype is Dtype.FP16:
        yield fault(("trainer.dtype",), "engines have experts in BF16 alone", _BF16)
    if plan.trainer.quantises:
        yield fault(("trainer.forward",), f"`{plan.trainer.forward}` does not know experts", _BF16)

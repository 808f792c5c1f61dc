"""Rules of what is maximised and how: what contradicts itself, and what would be ignored. Pure, as recipe/rules.py."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.corrections.objective import Advantage, Estimator, KlPlace
from appliance.corrections.registry import METHODS
from appliance.finding import Finding, fault
from appliance.recipe.schema import Recipe
from appliance.recipe.text import Scalar, in_yaml
from appliance.settings.sections import Algorithm, Forward
from appliance.terms.devices import AUTO
from appliance.terms.schemes import Scheme, listed
from appliance.terms.settings import Dtype, Schedule

MOST_OF_A_MEAN = 0.1  # from 1: a response whose mean ratio is farther away is another policy's


def broken_objective(recipe: Recipe) -> Iterator[Finding]:
    for rule in (_correction, _bounds, _aggregate, _gdpo, _kl, _entropy, _schedule, _dtype):
        yield from rule(recipe)


def _correction(recipe: Recipe) -> Iterator[Finding]:
    """Check that the correction has a meaning beside the loss: the table of docs/algorithms.md."""
    loss, method = recipe.algorithm.loss, METHODS[recipe.correction.method]
    if message := method.conflict(loss):
        fitting = [name for name, each in METHODS.items() if not each.conflict(loss)]
        source = f"`{loss.spec.correction}` as its source does, or another one of " if loss.spec.correction else ""
        hint = f"use {source}{listed(fitting)}"
        yield fault(("correction.method", "algorithm.loss"), message, hint)


def _bounds(recipe: Recipe) -> Iterator[Finding]:
    loss, usual = recipe.algorithm.loss, Algorithm(loss=recipe.algorithm.loss).bounds
    for key, bound in recipe.algorithm.bounds.items():
        if key not in loss.spec.bounds:
            if getattr(recipe.algorithm, key) is not None:
                keys = (f"algorithm.{key}", "algorithm.loss")
                yield fault(keys, f"`{loss}` has no such bound", "remove it, or set it to null")
        elif loss.spec.of_sequences and (bound - 1 if key == "dual_clip" else bound) > MOST_OF_A_MEAN:
            message = f"`{loss}` bounds the mean ratio of a response, and {bound:g} is a bound for a token's"
            yield fault((f"algorithm.{key}", "algorithm.loss"), message, f"give one such as {usual[key]:g}, or null")


def _aggregate(recipe: Recipe) -> Iterator[Finding]:
    spec, given = recipe.algorithm.loss.spec, recipe.algorithm.aggregate
    if spec.own_aggregate and given not in (None, spec.aggregate):
        message = f"`{recipe.algorithm.loss}` is aggregated as a mean over responses, and in no other way"
        hint = f"use `{spec.aggregate}`, or null"
        yield fault(("algorithm.aggregate", "algorithm.loss", "algorithm.kind"), message, hint)


def _gdpo(recipe: Recipe) -> Iterator[Finding]:
    algorithm = recipe.algorithm
    if algorithm.advantage is not Advantage.GDPO:
        return
    key, hint = "algorithm.advantage", "use another advantage, such as `grpo`"
    if not recipe.task.is_own or len(recipe.task.rewards) < 2:
        message = "`gdpo` normalises each of several rewards, and this task has one"
        yield fault((key, "task.rewards", "task.kind"), message, hint)
    if algorithm.kl and algorithm.kl_in is KlPlace.REWARD:
        message = "`gdpo` reads the task's rewards one by one, and would ignore the KL term"
        yield fault((key, "algorithm.kl_in"), message, f"set kl_in to `loss`, or {hint}")
    if algorithm.overlong_tokens:
        message = "`gdpo` reads the task's rewards one by one, and would ignore the penalty for length"
        yield fault((key, "algorithm.overlong_tokens"), message, f"use the built-in reward `length`, or {hint}")


def _kl(recipe: Recipe) -> Iterator[Finding]:
    algorithm = recipe.algorithm
    for key in ("kl_estimator", "kl_in"):
        if not algorithm.kl and getattr(algorithm, key) != Algorithm.model_fields[key].default:
            keys = (f"algorithm.{key}", "algorithm.kl")
            yield fault(keys, "there is no divergence without a weight", "remove it, or give algorithm.kl")
    if not algorithm.kl:
        return
    if algorithm.kl_estimator is Estimator.K1 and algorithm.kl_in is KlPlace.LOSS:
        message = "`k1` in the loss has a gradient of mean 0 wherever the policy is: it holds nothing back"
        yield fault(("algorithm.kl_estimator", "algorithm.kl_in"), message, "use `k3` or `k2`, or kl_in: reward")
    if (forward := recipe.trainer.forward) is not Forward.BF16:
        message = f"the reference computes in BF16: with `{forward}` the divergence would be the quantisation's"
        yield fault(("algorithm.kl", "trainer.forward"), message, "use trainer.forward: bf16, or algorithm.kl: 0")


def _entropy(recipe: Recipe) -> Iterator[Finding]:
    if recipe.algorithm.entropy_bonus and recipe.trainer.forward is Forward.ROLLOUT:
        message = "with `rollout` the entropy has no gradient, and a bonus for it would do nothing"
        keys = ("algorithm.entropy_bonus", "trainer.forward")
        yield fault(keys, message, "use trainer.forward: bf16, or algorithm.entropy_bonus: 0")


def _schedule(recipe: Recipe) -> Iterator[Finding]:
    if recipe.optimizer.schedule is Schedule.CONSTANT and recipe.optimizer.min_lr_ratio:
        keys = ("optimizer.min_lr_ratio", "optimizer.schedule")
        yield fault(keys, "a constant rate does not sink", "remove it, or use `cosine` or `linear`")


def _dtype(recipe: Recipe) -> Iterator[Finding]:
    """Refuse FP16 beside what computes in BF16 whatever is asked. `plan/rules.py` asks for experts, too."""
    if recipe.trainer.dtype is not Dtype.FP16:
        return
    quantised = [scheme for scheme in recipe.rollout.schemes if scheme is not Scheme.BF16]
    named_schemes = [scheme for scheme in quantised if scheme != AUTO]
    refused: list[tuple[str, object, Scalar, str]] = [
        ("trainer.forward", recipe.trainer.forward, Forward.BF16, "the rollouts' forward has its kernels in BF16"),
        ("model.lora", recipe.model.lora, None, "with an adapter the model is kept and merged in BF16"),
        ("correction.uaq_scale", recipe.correction.uaq_scale, None, "FP16 has no numbers as small as UAQ's weights"),
    ]
    if quantised:  # FP16 has no exponents below 2^-14: most weights times a scale of 2^-3 would lose bits
        message = "a profile scales weights, and FP16 has no numbers as small as some of them become"
        refused.append(("quantization.profile", recipe.quantization.profile, "none", message))
    for name, value, fitting, message in refused:
        if value != fitting:
            hint = f"use {name}: {in_yaml(fitting)}, or trainer.dtype: bf16"
            yield fault((name, "trainer.dtype"), message, hint)
    if other := next((scheme for scheme in named_schemes if not scheme.spec.in_fp16), None):
        key = "rollout.replicas" if recipe.rollout.replicas else "rollout.scheme"
        yield fault((key, "trainer.dtype"), f"engines have `{other}` in BF16 alone", "use `int8` or `bf16`")

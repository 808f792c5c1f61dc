"""The arithmetic of a step: what must divide what, what must hold what. verl checks little of it, and with packing by
tokens next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from appliance.recipe.broken import Broken
from appliance.recipe.schema import Algorithm, AlgorithmKind, Recipe


def batch_rules(recipe: Recipe) -> Iterator[Broken]:
    batch, samples = recipe.batch, recipe.rollout.samples_per_prompt
    gpus = recipe.topology.gpus
    sizes = ("rollout.samples_per_prompt", "cluster.gpus_per_node", "cluster.nodes")
    ranks, prompts = recipe.topology.data_parallel, batch.prompts_per_step
    mini = batch.mini_batch_prompts or prompts
    mini_keys = ("batch.mini_batch_prompts", "batch.prompts_per_step")
    if prompts * samples % gpus:
        message = f"{prompts} prompts x {samples} samples do not divide over {gpus} GPUs"
        yield Broken(("batch.prompts_per_step", *sizes), message, "each GPU takes the same number of sequences")
    if mini > prompts:
        yield Broken(mini_keys, f"{mini} is more than the {prompts} prompts of a step", "lower it")
    elif prompts % mini:
        yield Broken(mini_keys, f"{mini} does not divide the {prompts} prompts of a step", "use a divisor")
    if mini * samples % ranks:
        if mini != prompts:
            message = f"{mini} prompts x {samples} samples do not divide over {ranks} data-parallel ranks"
            yield Broken((*mini_keys, *sizes), message, "each rank takes the same number of sequences")
    elif batch.micro_batch_sequences and (mini * samples // ranks) % batch.micro_batch_sequences:
        message = f"{batch.micro_batch_sequences} does not divide the {mini * samples // ranks} sequences of a rank"
        keys = ("batch.micro_batch_sequences", *mini_keys, *sizes)
        yield Broken(keys, message, "it is the sequences of one forward on one GPU")
    yield from _packing(recipe)
    if 0 < recipe.task.train_size < prompts:
        message = f"{recipe.task.train_size} problems do not fill one step of {prompts} prompts"
        yield Broken(("task.train_size", "batch.prompts_per_step"), message, "raise it")


def _packing(recipe: Recipe) -> Iterator[Broken]:
    batch, longest = recipe.batch, recipe.task.longest
    if batch.max_tokens_per_gpu and batch.micro_batch_sequences:
        keys = ("batch.max_tokens_per_gpu", "batch.micro_batch_sequences")
        yield Broken(keys, "`max_tokens_per_gpu` and `micro_batch_sequences` exclude each other", "remove one of them")
    room = (batch.max_tokens_per_gpu or longest) * recipe.trainer.sequence_parallel
    if room < longest:
        message = f"{batch.max_tokens_per_gpu} tokens do not hold one sequence of {longest} (prompt and response)"
        keys = ("batch.max_tokens_per_gpu", "task.max_response_tokens", "trainer.sequence_parallel")
        yield Broken(keys, message, "raise it")


def dapo_rules(recipe: Recipe) -> Iterator[Broken]:
    """What only `dapo` has, and how it must fit."""
    algorithm, batch = recipe.algorithm, recipe.batch
    if algorithm.kind is not AlgorithmKind.DAPO:
        given = [
            f"algorithm.{key}"
            for key in ("max_generation_batches", "overlong_tokens", "overlong_penalty")
            if getattr(algorithm, key) != Algorithm.model_fields[key].default
        ]
        for key in (*given, *(["batch.generation_prompts"] if batch.generation_prompts else [])):
            message = f"`{algorithm.kind}` has no such thing, it is of `dapo`"
            yield Broken((key, "algorithm.kind"), message, "remove it, or set algorithm.kind to `dapo`")
        return
    longest = recipe.task.max_response_tokens
    if algorithm.overlong_tokens > longest:
        message = f"{algorithm.overlong_tokens} is more than the {longest} tokens of a response"
        yield Broken(("algorithm.overlong_tokens", "task.max_response_tokens"), message, "lower it")
    prompts = batch.prompts_per_step
    if (batch.generation_prompts or prompts) % prompts:
        message = f"{batch.generation_prompts} is no multiple of the {prompts} prompts of a step"
        hint = "verl 0.9.1 counts prompts in generation in whole steps (max_inflight_gen_batches)"
        yield Broken(("batch.generation_prompts", "batch.prompts_per_step"), message, hint)

"""The numbers that a recipe leaves open, each with its reason. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from appliance.plan.model import Choice, ModelPlan, TaskPlan
from appliance.recipe.schema import AlgorithmKind, Attention, Recipe

Value = TypeVar("Value", int, str, bool)

_LARGEST_CONCURRENCY = 256
_TOKENS_OF_AN_ENGINE_STEP = {True: 4096, False: 8192}  # by "is a CPU"
_TOKENS_OF_A_FORWARD = {True: 16384, False: 4096}  # by "is built-in": logits of a 150 000-word vocabulary are large
_BUCKET_MIB = {True: 64, False: 512}  # by "is built-in"
_MOST_AGENT_WORKERS = 8
FLASH = str(Attention.FLASH_ATTENTION_2)


@dataclass(frozen=True)
class Derived:
    """What was decided and verl must be told. Sizes in sequences, tokens, MiB.

    eager: as in RolloutPlan.
    generation_batches: steps' worth of prompts that `dapo` generates at a time.
    max_generated_prompts: `dapo` ends the run when a step needs more; 0: any number.
    """

    run_dir: Path
    model_path: str
    train_parquet: str
    val_parquet: str
    is_cpu: bool
    eager: bool
    attention: str
    steps: int
    mini_batch_prompts: int
    micro_batch_sequences: int
    max_model_tokens: int
    max_concurrent_sequences: int
    max_batched_tokens: int
    chunked_prefill: bool
    validate_every: int
    bucket_mib: int
    generation_batches: int
    max_generated_prompts: int
    gradient_checkpointing: bool
    packed: bool
    num_agent_workers: int


@dataclass
class _Book:
    """Notes every choice on its way."""

    choices: list[Choice] = field(default_factory=list)

    def note(self, key: str, value: Value, why: str) -> Value:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        self.choices.append(Choice(key, text, why))
        return value


def derive(
    recipe: Recipe, *, run_dir: Path, is_cpu: bool, eager: bool, model: ModelPlan, task: TaskPlan
) -> tuple[Derived, tuple[Choice, ...]]:
    """Every number, and why. model, task: as planned."""
    book, builtin = _Book(), bool(model.builtin)
    longest = recipe.task.max_prompt_tokens + recipe.task.max_response_tokens
    mini = recipe.batch.mini_batch_prompts or recipe.batch.prompts_per_step
    steps = book.note("trainer.steps", *_steps(recipe))
    book.note("checkpoint.every_steps", *_every(recipe.checkpoint.every_steps, steps=steps))
    attention = book.note("trainer.attention", *_attention(recipe, is_cpu=is_cpu))
    derived = Derived(
        run_dir=run_dir,
        model_path=model.path,
        train_parquet=task.train_parquet,
        val_parquet=task.val_parquet,
        is_cpu=is_cpu,
        eager=eager,
        steps=steps,
        validate_every=book.note("trainer.validate_every", *_every(recipe.trainer.validate_every, steps=steps)),
        attention=attention,
        packed=attention == FLASH,
        gradient_checkpointing=book.note("trainer.gradient_checkpointing", *_gradient_checkpointing(builtin)),
        mini_batch_prompts=book.note(
            "batch.mini_batch_prompts", mini, "as given" if recipe.batch.mini_batch_prompts else "the whole step"
        ),
        micro_batch_sequences=book.note(
            "batch.micro_batch_sequences", *_micro_batch(recipe, mini_batch_prompts=mini, is_builtin=builtin)
        ),
        max_model_tokens=book.note("engine.max_model_tokens", longest, "longest prompt and longest response"),
        max_concurrent_sequences=book.note("engine.max_concurrent_sequences", *_concurrency(recipe)),
        max_batched_tokens=book.note(
            "engine.max_batched_tokens",
            max(longest, _TOKENS_OF_AN_ENGINE_STEP[is_cpu]),
            "tokens of one engine step: at least one whole sequence",
        ),
        chunked_prefill=_chunked_prefill(recipe, is_cpu=is_cpu, book=book),
        num_agent_workers=book.note("rollout.agent_workers", *_agent_workers(recipe, is_cpu=is_cpu)),
        generation_batches=_generation_batches(recipe, book=book),
        max_generated_prompts=_max_generated_prompts(recipe, book=book),
        bucket_mib=book.note(
            "sync.bucket_mib", _BUCKET_MIB[builtin], "of weights at a time; shared memory of this size is held"
        ),
    )
    return derived, tuple(book.choices)


def _generation_batches(recipe: Recipe, *, book: _Book) -> int:
    """Not noted where no prompt is filtered."""
    if recipe.algorithm.kind is not AlgorithmKind.DAPO:
        return 1
    prompts = recipe.batch.prompts_per_step
    batches = (recipe.batch.generation_prompts or prompts) // prompts
    why = f"x {prompts} prompts: verl fetches them one by one to replace those that say nothing (gen_batch_size 1)"
    return book.note("algorithm.generation_batches", batches, f"{why}, and holds at most so many in flight")


def _max_generated_prompts(recipe: Recipe, *, book: _Book) -> int:
    batches = recipe.algorithm.max_generation_batches
    if recipe.algorithm.kind is not AlgorithmKind.DAPO or not batches:
        return 0
    at_a_time = recipe.batch.generation_prompts or recipe.batch.prompts_per_step
    why = f"{batches} x {at_a_time}: a step that needs more ends the run; verl 0.9.1 has no such limit, we count"
    return book.note("algorithm.max_generated_prompts", batches * at_a_time, why)


def _every(given: int, *, steps: int) -> tuple[int, str]:
    return (given, "as given, and at the end") if given else (steps, "only at the end")


def _chunked_prefill(recipe: Recipe, *, is_cpu: bool, book: _Book) -> bool:
    """Not noted where it is as given. vLLM 0.28 winds a sample's generator back after a part of a prompt."""
    if not (is_cpu and recipe.rollout.chunked_prefill):
        return recipe.rollout.chunked_prefill
    why = "each sample has a seed, and on a CPU vLLM cannot take back what it drew after a part of a prompt"
    return book.note("rollout.chunked_prefill", False, why)


def _gradient_checkpointing(is_builtin: bool) -> tuple[bool, str]:
    if is_builtin:
        return False, "the model is tiny: recomputing costs time and saves nothing"
    return True, "activations are recomputed: less memory, a third more time"


def _agent_workers(recipe: Recipe, *, is_cpu: bool) -> tuple[int, str]:
    if is_cpu:
        return 1, "each is a process that imports verl"
    gpus = recipe.cluster.nodes * recipe.cluster.gpus_per_node
    return min(_MOST_AGENT_WORKERS, gpus), f"one per GPU, at most {_MOST_AGENT_WORKERS}"


def _steps(recipe: Recipe) -> tuple[int, str]:
    if recipe.trainer.steps:
        return recipe.trainer.steps, "as given"
    epochs, prompts = recipe.trainer.epochs or 0, recipe.batch.prompts_per_step
    per_epoch = recipe.task.train_size // prompts
    return epochs * per_epoch, f"{epochs} epochs x {recipe.task.train_size} problems // {prompts} prompts"


def _concurrency(recipe: Recipe) -> tuple[int, str]:
    """The sequences that one engine holds at a time."""
    replicas = recipe.cluster.nodes * recipe.cluster.gpus_per_node // recipe.rollout.tensor_parallel
    sequences = math.ceil(recipe.batch.prompts_per_step * recipe.rollout.samples_per_prompt / replicas)
    if sequences <= _LARGEST_CONCURRENCY:
        return sequences, f"{sequences} sequences of a step on an engine, all at once"
    return _LARGEST_CONCURRENCY, f"{sequences} sequences of a step on an engine, at most {_LARGEST_CONCURRENCY} at once"


def _micro_batch(recipe: Recipe, *, mini_batch_prompts: int, is_builtin: bool) -> tuple[int, str]:
    """The sequences of one forward of the trainer: the largest divisor of a rank's share that fits the tokens."""
    if recipe.batch.micro_batch_sequences:
        return recipe.batch.micro_batch_sequences, "as given"
    ranks = recipe.cluster.nodes * recipe.cluster.gpus_per_node // recipe.trainer.sequence_parallel
    share = mini_batch_prompts * recipe.rollout.samples_per_prompt // ranks
    longest = recipe.task.max_prompt_tokens + recipe.task.max_response_tokens
    fits = max(1, _TOKENS_OF_A_FORWARD[is_builtin] // longest)
    size = next(each for each in range(min(fits, share), 0, -1) if share % each == 0)
    return size, f"largest divisor of a rank's {share} sequences with at most {fits} x {longest} tokens"


def _attention(recipe: Recipe, *, is_cpu: bool) -> tuple[str, str]:
    if recipe.trainer.attention is not Attention.AUTO:
        return str(recipe.trainer.attention), "as given"
    if is_cpu:
        return "sdpa", "PyTorch's own; flash_attention_2 needs a GPU"
    return FLASH, "packs sequences without padding"

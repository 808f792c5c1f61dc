"""The numbers that a recipe leaves open, each noted with its reason. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from appliance.corrections.objective import Aggregate, KlPlace
from appliance.corrections.registry import METHODS, correction_of
from appliance.guard.policy import Action
from appliance.recipe.rules import shadow_sequences
from appliance.recipe.schema import Recipe
from appliance.recipe.text import in_yaml
from appliance.record.plan import Choice, EnginePlan, ShadowPlan, TrainerMemory, UaqPlan
from appliance.settings.sections import (
    Algorithm,
    Attention,
    Batch,
    Checkpoint,
    Correction,
    Forward,
    LoraSync,
    Model,
    Trainer,
)
from appliance.terms.counts import counted
from appliance.terms.devices import CPU, GPUS, USUAL_SEQUENCES_AT_ONCE
from appliance.terms.settings import Dtype, OldLogProbs
from appliance.terms.shapes import Linear, ModelShape

Value = TypeVar("Value", int, str, bool)

SCALED_FOLDER = "scaled"
_TOKENS_OF_AN_ENGINE_STEP = {True: 4096, False: 8192}  # by "is a CPU"
_BUCKET_MIB = {True: 64, False: 512}  # by "is tiny": all of its weights fit
_ATTENTIONS = {
    Attention.AUTO: "ours: PyTorch's kernels for sequences that lie in a row, without padding",
    Attention.FLASH_ATTENTION_2: "as given: by the package flash-attn; `auto` needs none",
}
_IN_FP16 = (
    "engines and what they are sent, too; losses are scaled: an update that overflows is left out and halves that"
)
_OF_ROLLOUTS = (
    "the engines': no pass over the batch before an update, whose own forward is checked against them; a correction "
    "has nothing to act on"
)
_SENT = {
    LoraSync.MERGE: "merged at each update of weights: engines see a model as any other",
    LoraSync.ADAPTER: "sent alone: engines keep the model as they quantised it at their first update",
}
_IN_UPDATE = (
    "a step's only update gives them: no pass over the batch before it; the loss corrects by them, and what it used is "
    "checked against the log-probs that the workers held"
)


@dataclass(frozen=True)
class Pace:
    """Amount that the trainer forwards at once; plan/room.py chooses it."""

    gradient_checkpointing: bool
    forward_tokens: int
    """Tokens of one forward of a rank, at most, unless one sequence is longer."""
    why: str
    sequences: int = 0
    """Sequences of one forward as an earlier attempt of the run had them, in place of the tokens; 0: there was none."""
    keeps_copies: bool = False
    """TrainerMemory's field of this name."""


class Book:
    """Every choice on its way into the plan."""

    def __init__(self) -> None:
        self.choices: list[Choice] = []

    def note(self, key: str, value: Value, why: str) -> Value:
        self.choices.append(Choice(key=key, value=in_yaml(value), why=why))
        return value


def steps_of(recipe: Recipe) -> tuple[int, str]:
    """Return (trainer.steps, why)."""
    if recipe.trainer.steps:
        return recipe.trainer.steps, "as given"
    epochs, prompts = recipe.trainer.epochs or 0, recipe.batch.prompts_per_step
    per_epoch = recipe.task.train_size // prompts
    size = counted(recipe.task.train_size, "problem")
    return epochs * per_epoch, f"{counted(epochs, 'epoch')} x {size} // {counted(prompts, 'prompt')}"


def plan_interval(given: int, *, steps: int) -> tuple[int, str]:
    return (given, "as given, and at the end") if given else (steps, "only at the end")


def plan_saves(checkpoint: Checkpoint, *, steps: int) -> tuple[int, str]:
    """Return (checkpoint.every_steps, why, with the other occasions of a save)."""
    number, why = plan_interval(checkpoint.every_steps, steps=steps)
    others = [f"every {checkpoint.every_minutes:g} minutes"] if checkpoint.every_minutes else []
    others += ["at the best validation so far"] if checkpoint.keep_best else []
    return number, ", ".join([why if checkpoint.every_steps else "at the end", *others]) if others else why


def attention_of(recipe: Recipe) -> tuple[str, str]:
    """Return (transformers' name of the attention, why)."""
    attention = recipe.trainer.attention
    return attention.in_transformers, _ATTENTIONS[attention]


def plan_trainer(recipe: Recipe, *, is_cpu: bool, steps: int, book: Book) -> Trainer:
    """Resolve the section: its steps and the source of its old log-probs. Validations in BF16 are planned in
    engines.py."""
    trainer = recipe.trainer
    if trainer.fp8_backward:
        emulated = "; emulated: for its numbers, not for speed" if recipe.quantization.emulate else ""
        book.note("trainer.backward", str(trainer.backward), f"as given{emulated}")
    if trainer.dtype is Dtype.FP16:
        book.note("trainer.dtype", trainer.dtype, _IN_FP16)
    source = book.note("trainer.old_log_probs", *old_log_probs_of(recipe, is_cpu=is_cpu))
    validate_every, _ = plan_interval(trainer.validate_every, steps=steps)
    return trainer.replace(steps=steps, validate_every=validate_every, old_log_probs=source)


def plan_trainer_memory(pace: Pace, *, book: Book) -> TrainerMemory:
    return TrainerMemory(
        gradient_checkpointing=book.note("trainer.gradient_checkpointing", pace.gradient_checkpointing, pace.why),
        keeps_copies=pace.keeps_copies,
    )


def plan_batch(recipe: Recipe, *, pace: Pace, book: Book) -> Batch:
    """Resolve the section's sizes, all but `max_tokens_per_gpu`, which may be off."""
    batch = recipe.batch
    why = "as given" if batch.mini_batch_prompts else "the whole step"
    batch = batch.replace(
        generation_prompts=batch.generation_prompts or batch.prompts_per_step,
        mini_batch_prompts=book.note("batch.mini_batch_prompts", prompts_of_an_update(recipe), why),
    )
    sequences = book.note("batch.micro_batch_sequences", *micro_batch(recipe, pace=pace))
    return batch.replace(micro_batch_sequences=sequences)


def prompts_of_an_update(recipe: Recipe) -> int:
    return recipe.batch.mini_batch_prompts or recipe.batch.prompts_per_step


def old_log_probs_of(recipe: Recipe, *, is_cpu: bool) -> tuple[OldLogProbs, str]:
    """Return (where a step's old log-probs come from, why)."""
    source = recipe.trainer.old_log_probs
    if source is OldLogProbs.ROLLOUT:
        return OldLogProbs.ROLLOUT, _OF_ROLLOUTS
    if source is OldLogProbs.RECOMPUTE:
        return OldLogProbs.RECOMPUTE, "as given: a pass over the batch before the update"
    if reason := why_a_pass(recipe, is_cpu=is_cpu):
        return OldLogProbs.RECOMPUTE, f"a pass over the batch before the update: {reason}"
    if recipe.trainer.forward is Forward.ROLLOUT:
        return OldLogProbs.ROLLOUT, _OF_ROLLOUTS
    return OldLogProbs.UPDATE, _IN_UPDATE


def why_a_pass(recipe: Recipe, *, is_cpu: bool) -> str:
    """Say what needs old log-probs before a step's update, or needs others than that update's forward gives.

    Empty where nothing does."""
    method, lora = METHODS[recipe.correction.method], recipe.model.lora
    one_flow = recipe.trainer.forward is Forward.ROLLOUT
    if prompts_of_an_update(recipe) != recipe.batch.prompts_per_step:
        return "a step has several updates, and only the first one's forward is of the policy before them"
    if lora is not None and lora.dropout:
        return "an update's forward has the dropout of `model.lora`, and the policy has none"
    if recipe.trainer.attention is Attention.FLASH_ATTENTION_2:
        return "flash-attn may apply dropout in an update, by the model's config.json, and the policy has none"
    if recipe.algorithm.kl and recipe.algorithm.kl_in is KlPlace.REWARD:
        return "`algorithm.kl` is in the reward, which the advantages are made of"
    if method.reads_step and not one_flow:  # there the engines' are known before the update
        return f"`{method.name}` weights a sequence by the whole step"
    if method.has_shadow_pass:
        return f"`{method.name}` has a shadow pass that compares with them"
    if one_flow and Action.TIGHTEN in (recipe.guard.actions or ()):
        return "`tighten` in `guard.actions` is for a correction, which the engines' leave nothing to act on"
    if one_flow and not is_cpu:
        return "on a GPU nothing promises that the engines' are the trainer's to the last bit"
    return ""


def micro_batch(recipe: Recipe, *, pace: Pace) -> tuple[int, str]:
    """Return (sequences of one forward of the trainer, why): the recipe's, an earlier attempt's, or the largest divisor
    of a rank's share that fits the tokens."""
    if recipe.batch.micro_batch_sequences:
        return recipe.batch.micro_batch_sequences, "as given"
    if pace.sequences:
        return pace.sequences, pace.why
    share = sequences_of_a_rank(recipe)
    fits = max(1, pace.forward_tokens // recipe.task.longest)
    why = f"largest divisor of a rank's {counted(share, 'sequence')} with at most {fits} x {recipe.task.longest} tokens"
    return _largest_divisor(share, most=fits), why


def sequences_of_a_rank(recipe: Recipe) -> int:
    """Return the number of sequences of a mini-batch that one rank of the trainer has."""
    return prompts_of_an_update(recipe) * recipe.rollout.samples_per_prompt // recipe.topology.data_parallel


def _largest_divisor(number: int, *, most: int) -> int:
    """Return the largest divisor up to `most`; 1 for a number of 0, which rules refuse."""
    return next((divisor for divisor in range(min(most, number), 0, -1) if number % divisor == 0), 1)


def plan_engine(recipe: Recipe, *, device: str, eager: bool, shape: ModelShape | None, book: Book) -> EnginePlan:
    """Choose the sizes of an engine. device: one of DEVICES.  eager: as EnginePlan has it.  shape: of the model, None
    where it is not known."""
    is_cpu, is_tiny = device == CPU, shape is not None and shape.is_tiny
    most = USUAL_SEQUENCES_AT_ONCE if is_cpu else GPUS[device].sequences_at_once
    longest, sequences = recipe.task.longest, math.ceil(_sequences_of_a_step(recipe) / recipe.topology.engines)
    at_once = f"at most {most}" if sequences > most else "all"
    batched = max(longest, _TOKENS_OF_AN_ENGINE_STEP[is_cpu])
    return EnginePlan(
        eager=eager,
        max_model_tokens=book.note("engine.max_model_tokens", longest, "longest prompt and longest response"),
        max_concurrent_sequences=book.note(
            "engine.max_concurrent_sequences",
            min(sequences, most),
            f"{counted(sequences, 'sequence')} of a step on an engine, {at_once} at once",
        ),
        max_batched_tokens=book.note(
            "engine.max_batched_tokens", batched, "tokens of one engine step: at least one whole sequence"
        ),
        bucket_mib=_BUCKET_MIB[is_tiny],
    )


def _sequences_of_a_step(recipe: Recipe) -> int:
    return recipe.batch.prompts_per_step * recipe.rollout.samples_per_prompt


def plan_algorithm(recipe: Recipe, *, book: Book) -> Algorithm:
    """Resolve the section: the values that its kind and its loss stand for."""
    algorithm = recipe.algorithm
    spec = algorithm.loss.spec
    kind = f"algorithm.kind: {algorithm.kind}"
    for key, usual in algorithm.preset.items():
        value = str(algorithm.aggregated if key == "aggregate" else getattr(algorithm, key))
        book.note(f"algorithm.{key}", value, kind if value == usual else f"given beside {kind}, which has {usual}")
    if algorithm.aggregate is None and algorithm.aggregated is not Aggregate.TOKEN_MEAN:
        book.note("algorithm.aggregate", str(spec.aggregate), f"of `{algorithm.loss}`")
    for key, bound in algorithm.bounds.items():
        if getattr(algorithm, key) is None and key in spec.bounds and spec.source:
            book.note(f"algorithm.{key}", f"{bound:g}", spec.source)
    if algorithm.kl:
        why = "the model at the start, beside the one that is trained: one more pass over each step's batch"
        book.note("reference", f"{algorithm.kl_estimator} in the {algorithm.kl_in}", why)
    if algorithm.filters:
        prompts = recipe.batch.prompts_per_step
        at_a_time = recipe.batch.generation_prompts or prompts
        why = f"x {counted(prompts, 'prompt')}: verl fetches them one by one"
        why = f"{why} to replace those that teach nothing (gen_batch_size 1)"
        book.note("algorithm.generation_batches", at_a_time // prompts, f"{why}, and holds at most so many in flight")
        if batches := algorithm.max_generation_batches:
            why = (
                f"{batches} x {at_a_time}: a step that needs more ends the run; verl 0.9.1 has no such limit, we count"
            )
            book.note("algorithm.max_generated_prompts", batches * at_a_time, why)
    return algorithm.replace(aggregate=algorithm.aggregated, **algorithm.bounds)


def plan_correction(recipe: Recipe, *, book: Book) -> Correction:
    """Resolve the section: the limits of its method. A limit that the recipe leaves to the method is noted."""
    correction = recipe.correction
    method = correction_of(correction.method, cap=correction.cap, bounds=correction.bounds)
    if correction.cap is None and method.cap is not None:
        book.note("correction.cap", f"{method.cap:g}", method.source)
    if correction.bounds is None and method.bounds is not None:
        book.note("correction.bounds", f"[{method.bounds[0]:g}, {method.bounds[1]:g}]", method.source)
    return correction.replace(cap=method.cap, bounds=method.bounds)


def plan_shadow(recipe: Recipe, *, batch: Batch, book: Book) -> ShadowPlan | None:
    """Plan the shadow pass; None where the correction has none. batch: the plan's."""
    correction = recipe.correction
    if not METHODS[correction.method].has_shadow_pass:
        return None
    sequences = shadow_sequences(recipe)
    when = f"after step 1 and every {counted(correction.shadow_every, 'step')}"
    why = f"{when}, {correction.shadow_fraction:g} of a step's {_sequences_of_a_step(recipe)}, equal on each rank"
    book.note("correction.shadow", counted(sequences, "sequence"), why)
    share = sequences // recipe.topology.data_parallel
    return ShadowPlan(sequences=sequences, forward_sequences=_largest_divisor(share, most=batch.micro_batch_sequences))


def plan_uaq(recipe: Recipe, *, run_dir: Path, book: Book) -> UaqPlan | None:
    """Plan UAQ; None without `uaq_scale`. The scaled model is in the run's folder, where a resumed run finds it."""
    scale = recipe.correction.uaq_scale
    if scale is None:
        return None
    why = f"what a norm feeds is divided by {scale:g} once before training, and model/ is folded back"
    book.note("correction.uaq_scale", f"{scale:g}", why)
    return UaqPlan(scale=scale, folder=str(run_dir / SCALED_FOLDER))


def plan_model(recipe: Recipe, *, book: Book) -> Model:
    """Resolve the section: alpha and layers of its adapter, where it has one."""
    lora = recipe.model.lora
    if lora is None:
        return recipe.model
    book.note("model.lora", f"rank {lora.rank}", _SENT[lora.sync])
    alpha = lora.alpha or book.note("model.lora.alpha", lora.rank, "as the rank")
    return recipe.model.replace(lora=lora.replace(alpha=alpha, targets=lora.targets or tuple(Linear)))

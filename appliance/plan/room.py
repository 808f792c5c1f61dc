"""What memory leaves to the trainer's forward: whether activations are kept, and how many tokens are forwarded at once.

What is kept need not be computed again, which saves a quarter of an update's time; and fewer, larger forwards spend
less on what each of them costs. On one rank of a CPU the BF16 copies of all weights are then kept through an update,
too: they are made of the rank's own masters, and nothing is gathered. All of this is bought with memory, so memory
decides: on a CPU the host's, on a GPU its own. A half of what the rest of the run leaves is for the forward, for the
estimate is by rule of thumb. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from appliance.plan.derive import Pace, micro_batch, sequences_of_a_rank
from appliance.plan.host import HostFacts
from appliance.plan.memory import GIB, forward_bytes, room_for_forward
from appliance.recipe.schema import Recipe
from appliance.record.plan import RunPlan, TrainerMemory
from appliance.terms.shapes import ModelShape

_SHARE = 2  # the forward has one part of so many of what is free
_TOKENS = (16384, 8192, 4096, 2048)  # of a forward that keeps its activations
_TOKENS_OF_THE_CAREFUL = 4096  # of one that does not, or whose memory is not known
_RECOMPUTED = "activations are recomputed, which takes a third more time"
UNKNOWN = Pace(True, _TOKENS_OF_THE_CAREFUL, _RECOMPUTED)


def choose_pace(recipe: Recipe, draft: RunPlan, *, shape: ModelShape | None, host: HostFacts) -> Pace:
    """Choose how much the trainer forwards at once, by the memory that is left. draft: the plan with any pace.  shape:
    of its model, None where it is not known."""
    free = room_for_forward(draft, shape, host_memory=host.memory_bytes) if shape else None
    if shape is None or free is None:
        return replace(UNKNOWN, why=f"{_RECOMPUTED}: {_why_not_estimated(shape)}")
    most = max(0, free) // _SHARE
    for trial, tokens in _paces(recipe, draft):
        if (needed := forward_bytes(trial, shape)) <= most:
            why = f"a forward keeps {needed / GIB:.1f} GiB, at most half of the {free / GIB:.1f} that the rest leaves"
            return Pace(False, tokens, why, keeps_copies=trial.trainer_memory.keeps_copies)
    left = f"half of the {max(0, free) / GIB:.1f} GiB that the rest leaves"
    why = f"{_RECOMPUTED}: {left} is too little to keep them"
    return Pace(True, _TOKENS_OF_THE_CAREFUL, why)


def _why_not_estimated(shape: ModelShape | None) -> str:
    if shape is not None and shape.has_experts:
        return "the memory of a forward through experts is not estimated"
    return "the model's sizes are not known, so its memory is not estimated"


def keep_pace(recipe: Recipe, *, before: Pace | None) -> Pace | None:
    """Return the pace of the run's previous attempt. With it every step is as it would have been without the
    interruption, whatever memory there is by now and whatever is known of the model. None where there is none to keep:
    it was not recorded, or `--force` has changed the batch, so that its sequences cannot be shared out by it."""
    share = sequences_of_a_rank(recipe)
    return before if before is not None and share % max(1, before.sequences) == 0 else None


def _paces(recipe: Recipe, draft: RunPlan) -> Iterator[tuple[RunPlan, int]]:
    keeps_copies = draft.is_cpu and draft.topology.gpus == 1
    for tokens in _TOKENS:
        pace = Pace(False, tokens, "")
        sequences, _ = micro_batch(recipe, pace=pace)
        memory = TrainerMemory(gradient_checkpointing=False, keeps_copies=keeps_copies)
        yield draft.replace(trainer_memory=memory, batch=draft.batch.replace(micro_batch_sequences=sequences)), tokens

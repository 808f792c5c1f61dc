"""Log-probs and entropies that an update's forward gives in a trainer's process, kept there for the driver.

verl hands an update's log-probs to its loss and then drops them. Where no pass precedes the update
(`trainer.old_log_probs: update` or `rollout` in the plan) they are the only ones of the policy before it: the driver
takes them after the update, by the keys of their sequences, for the step's metrics, masks and proof.

Legend: S sequences; N their response positions, sequence after sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils.tensordict_utils import get
from verl.workers.utils.padding import response_from_nested

from appliance.errors import TrainingError

_KEY = ("uid", "session_id")  # of a sequence: trainer/rollouts.py makes its key of them


class ForwardLogProbs(NamedTuple):
    """Results of one forward of an update for its sequences, before that update changed the weights."""

    keys: list[str]
    """Keys of the sequences, as the queue has them."""
    length_S: Tensor
    """Response positions of each sequence, sum N."""
    log_probs_N: Tensor
    """Log-probs of the response tokens, nats, float32."""
    entropy_N: Tensor
    """Entropies at the response tokens, nats, float32."""
    divergence_N: Tensor | None = None
    """Divergences by corrections/distributions.py, nats, float32; None where engines report no words."""


class SequenceLogProbs(NamedTuple):
    """The same of one sequence; fields as of ForwardLogProbs."""

    log_probs: Tensor
    entropy: Tensor
    divergence: Tensor | None


class UpdateLogProbs:
    """Results that one process collects: of every forward with gradients between `begin` and `end`."""

    def __init__(self) -> None:
        self._is_open = False
        self._forwards: list[ForwardLogProbs] = []

    @property
    def is_open(self) -> bool:
        """Whether the results of a forward are collected now."""
        return self._is_open and torch.is_grad_enabled()

    def begin(self, *, is_open: bool = True) -> None:
        """Drop what was collected, and collect again; nothing where is_open is False."""
        self._is_open, self._forwards = is_open, []

    def end(self) -> None:
        """Collect nothing more: the weights have changed."""
        self._is_open = False

    def add(self, data: TensorDict, *, log_probs: Tensor, entropy: Tensor, divergence: Tensor | None = None) -> None:
        """Collect what a forward gave.

        data: of verl's update, of these sequences.  log_probs, entropy: nested, of prompt and response each.
        divergence: nested, of responses.
        """
        mask = data["response_mask"]
        keys = [f"{uid}_{session}_0" for uid, session in zip(*(get(data, name) for name in _KEY), strict=True)]
        values = (response_from_nested(rows.detach(), mask).values().cpu() for rows in (log_probs, entropy))
        divergence_N = None if divergence is None else divergence.values().cpu()
        self._forwards.append(ForwardLogProbs(keys, mask.offsets().diff().cpu(), *values, divergence_N))

    def take(self) -> list[ForwardLogProbs]:
        """Return what was collected, once."""
        forwards, self._forwards = self._forwards, []
        return forwards


# One for a process: verl builds the model in one object, and sends its weights from another.
UPDATE_LOG_PROBS = UpdateLogProbs()


def take_update_log_probs(_worker: Any = None) -> list[ForwardLogProbs]:
    """Return what was collected in this process, once."""
    return UPDATE_LOG_PROBS.take()


def rows_by_key(
    forwards: Iterable[ForwardLogProbs], *, keys: Sequence[str], sequences: int
) -> dict[str, SequenceLogProbs]:
    """Return what the forwards of an update gave, by the key of each sequence.

    forwards: those of all ranks.  keys: of the step's sequences.  sequences: how many of them the update has.
    Raises TrainingError when their sequences are not so many of these.
    """
    rows = {}
    for forward in forwards:
        lengths = forward.length_S.tolist()
        columns = (
            [None] * len(lengths) if values_N is None else values_N.split(lengths)
            for values_N in (forward.log_probs_N, forward.entropy_N, forward.divergence_N)
        )
        rows |= dict(zip(forward.keys, map(SequenceLogProbs._make, zip(*columns, strict=True)), strict=True))
    if not sum(key in rows for key in keys) == len(rows) == sequences:
        what = f"{len(rows)} sequences of this step's first update were collected for its metrics, of {sequences}"
        raise TrainingError(what, hint="report it with the log; trainer.old_log_probs: recompute needs none")
    return rows

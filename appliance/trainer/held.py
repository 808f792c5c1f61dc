"""Log-probs and entropies that an update's forward gives in a trainer's process, held there for the driver.

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


class Held(NamedTuple):
    """What one forward of an update gave of its sequences, before that update changed the weights."""

    keys: list[str]
    """Of the sequences, as the queue has them."""
    length_S: Tensor
    """Response positions of each, sum N."""
    log_probs_N: Tensor
    """Nats, float32."""
    entropy_N: Tensor
    """Nats, float32."""
    divergence_N: Tensor | None = None
    """Of corrections/distributions.py, nats, float32; None where engines report no words."""


class HeldRow(NamedTuple):
    """The same of one sequence."""

    log_probs: Tensor
    entropy: Tensor
    divergence: Tensor | None


class HeldLogProbs:
    """Those of one process: of every forward with gradients between `begin` and `end`."""

    def __init__(self) -> None:
        self._is_open = False
        self._held: list[Held] = []

    @property
    def is_open(self) -> bool:
        """Whether what the forward gives now is to be held."""
        return self._is_open and torch.is_grad_enabled()

    def begin(self, *, is_open: bool = True) -> None:
        """Drop what is held, and hold what comes; nothing where is_open is False."""
        self._is_open, self._held = is_open, []

    def end(self) -> None:
        """Hold nothing more: the weights have changed."""
        self._is_open = False

    def hold(self, data: TensorDict, *, log_probs: Tensor, entropy: Tensor, divergence: Tensor | None = None) -> None:
        """data: of verl's update, of these sequences.  log_probs, entropy: nested, of prompt and response each.
        divergence: nested, of responses."""
        mask = data["response_mask"]
        keys = [f"{uid}_{session}_0" for uid, session in zip(*(get(data, name) for name in _KEY), strict=True)]
        values = (response_from_nested(rows.detach(), mask).values().cpu() for rows in (log_probs, entropy))
        divergence_N = None if divergence is None else divergence.values().cpu()
        self._held.append(Held(keys, mask.offsets().diff().cpu(), *values, divergence_N))

    def take(self) -> list[Held]:
        """What is held, once."""
        taken, self._held = self._held, []
        return taken


HELD = HeldLogProbs()  # of this process: verl builds the model, and another of its objects sends weights


def take_held(_worker: Any = None) -> list[Held]:
    """What is held in this process, once."""
    return HELD.take()


def rows_by_key(held: Iterable[Held], *, keys: Sequence[str], sequences: int) -> dict[str, HeldRow]:
    """What is held of each sequence, by its key.

    held: of all ranks.  keys: of the step's sequences.  sequences: how many of them the update has.
    Raises TrainingError when others are held than so many of these.
    """
    rows = {}
    for part in held:
        lengths = part.length_S.tolist()
        columns = (
            [None] * len(lengths) if values_N is None else values_N.split(lengths)
            for values_N in (part.log_probs_N, part.entropy_N, part.divergence_N)
        )
        rows |= dict(zip(part.keys, map(HeldRow._make, zip(*columns, strict=True)), strict=True))
    if not sum(key in rows for key in keys) == len(rows) == sequences:
        what = f"{len(rows)} sequences of this step's first update were held for its metrics, of {sequences}"
        raise TrainingError(what, hint="report it with the log; trainer.old_log_probs: recompute needs none")
    return rows

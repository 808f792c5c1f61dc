"""The words that a token was drawn from, where top-p or top-k leave some out: on their way from the engine to the
trainer, and in a softmax there.

Sampling with top-p draws from q(v) / sum over S of q, of the words v in S, the support. So that a log-prob of the
trainer's is of the same kind as the engine's, it has to be of p(v) / sum over S of p, with the engine's own S: a
softmax in which all other logits are -inf. The mean of the importance weight under the rollouts' policy is then the sum
over S of p's share, 1, whatever the two policies are. S is taken for given: there is no gradient through what is in it.

The trainer does with logits what the engine does, -inf and one log_softmax over the whole vocabulary, so that equal
logits give equal bits.

Legend: T tokens, R rows of logits, V words, F words in all supports together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Support:
    """The support of each token that an engine generated, token after token."""

    ids_F: NDArray[np.int32]
    """Words of the supports, token by token; those of a token in no order."""
    size_T: NDArray[np.int32]
    """Number of words in each token's support, sum F; 0: all words of the vocabulary."""

    def first(self, tokens: int) -> Support:
        return Support(self.ids_F[: int(self.size_T[:tokens].sum())], self.size_T[:tokens])

    def followed_by(self, other: Support) -> Support:
        pairs = ((self.ids_F, other.ids_F), (self.size_T, other.size_T))
        return Support(*(np.concatenate(pair) for pair in pairs))

    def spread(self, mask: Sequence[int]) -> Support:
        """Return the same supports with all words where the mask is 0: its ones are these tokens."""
        size_T = np.zeros(len(mask), np.int32)
        size_T[np.flatnonzero(mask)] = self.size_T
        return Support(self.ids_F, size_T)


class RowSupport(NamedTuple):
    """The support of each row of logits."""

    ids_F: Tensor
    """Words of the supports, row by row."""
    size_R: Tensor
    """Number of words in each row's support, int64, sum F; 0: all words."""

    def split(self, rows: int) -> Iterator[RowSupport]:
        """Split the supports into parts of so many rows."""
        sizes = self.size_R.split(rows)
        words = self.ids_F.split([int(size.sum()) for size in sizes])
        return map(RowSupport, words, sizes)

    def cut_(self, logits_RV: Tensor) -> Tensor:
        """Set logits to -inf outside of the support, in place. Returns them."""
        is_outside_RV = (self.size_R > 0)[:, None].repeat(1, logits_RV.shape[1])
        rows_F = torch.arange(len(self.size_R), device=logits_RV.device).repeat_interleave(self.size_R)
        is_outside_RV[rows_F, self.ids_F.long()] = False
        return logits_RV.masked_fill_(is_outside_RV, -torch.inf)


_SUPPORT: ContextVar[RowSupport | None] = ContextVar("support", default=None)


@contextmanager
def log_probs_over(support: RowSupport | None) -> Iterator[None]:
    """Have the log-probs that are computed meanwhile be over this support; verl's function of logits and words, which
    computes them, has no argument for it. support: of each row of those logits; None: all words."""
    token = _SUPPORT.set(support)
    try:
        yield
    finally:
        _SUPPORT.reset(token)


def current_support() -> RowSupport | None:
    """Return what `log_probs_over` has set."""
    return _SUPPORT.get()

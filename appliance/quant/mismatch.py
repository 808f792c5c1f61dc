"""How far the rollout policy is from the trainer's, and in sequences of which lengths that sits.

Legend: T response tokens of one step, sequence after sequence, padding already removed; S sequences.
    x_T = log p_trainer - log p_rollout      nats, float64
    w_T = exp(x_T)                           importance weight before truncation
    kl   = mean(-x)                          k1 estimate of KL(rollout || trainer), nats
    k3   = mean(exp(x) - 1 - x)              k3 estimate of the same, never negative, nats
    ess  = (sum w)^2 / (T sum w^2)           effective sample size as a share of T, 0..1
    chi2 = mean(w^2) - 1                     the chi-square divergence of the trainer from the rollout
    ppl_gap = mean over sequences of exp(-mean(log p_trainer)) - exp(-mean(log p_rollout)), positive where the trainer
              is the less sure of what was sampled
Every statistic is a function of sums over a group of tokens, of x, w, w^2, d = w - 1, d^2 and d - x:
    weight std = sqrt(mean(d^2) - mean(d)^2)   chi2 = mean(d^2) + 2 mean(d)
of d, because w is near 1: a spread of 1e-6 is lost in the last digits of w^2, and is 1e-12 in d^2.

Where it is to be none, both sides trace one sequence: `first_difference` is the layer to look at.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from appliance.errors import NumericsError

BUCKET_EDGES = (16, 64, 256, 1024, 4096, 16384)  # tokens; the longest sequence of each bucket, the last has no end
FARTHEST = 300.0  # nats below 0: with log-probs within it squared weights and perplexities are finite, and their sums


@dataclass(frozen=True)
class Mismatch:
    """Mismatch of one step; units as in the module's legend, probabilities and fractions 0..1, weights before
    truncation."""

    k3_kl: float
    kl: float
    probs_diff_mean: float
    probs_diff_max: float
    weight_mean: float
    weight_std: float
    weight_max: float
    ess: float
    truncated_fraction: float


def measure_mismatch(trainer_T: Tensor, *, rollout_T: Tensor, cap: float | None) -> Mismatch:
    """Measure as measure_by_length, for tokens that belong to no sequences."""
    one_S = torch.tensor([trainer_T.numel()])
    return measure_by_length(trainer_T, rollout_T=rollout_T, length_S=one_S, cap=cap).whole


@dataclass(frozen=True)
class LargestDifference:
    """The token on which the two policies differ most; the first of several that are equally far apart."""

    nats: float
    """Difference log p_trainer - log p_rollout, nats."""
    sequence: int
    """Row of the token's sequence in the batch, from 0."""
    position: int
    """Place of the token among the sequence's response tokens, from 0."""


@dataclass(frozen=True)
class LengthBucket(Mismatch):
    """Sequences of `min_tokens` to `max_tokens` response tokens (None: no end), and the mismatch of their tokens."""

    min_tokens: int
    max_tokens: int | None
    num_sequences: int
    num_tokens: int
    ppl_gap: float
    chi2: float
    largest: LargestDifference


@dataclass(frozen=True)
class MismatchByLength:
    whole: LengthBucket
    """Mismatch of all sequences that have a token."""
    buckets: tuple[LengthBucket, ...]
    """Mismatch of the buckets with a sequence, the short ones first."""


def measure_by_length(
    trainer_T: Tensor, *, rollout_T: Tensor, length_S: Tensor, cap: float | None, edges: tuple[int, ...] = BUCKET_EDGES
) -> MismatchByLength:
    """Measure the mismatch of a step and of its length buckets; the order of sequences and padding do not matter.

    trainer_T, rollout_T: [T] log-probabilities in nats, T > 0.  length_S: [S] int64, tokens of each sequence, sum T; a
    sequence without tokens counts nowhere.  cap: > 0, None where nothing is truncated.  edges: growing, tokens.
    Raises NumericsError when a value is not finite, which no pair within FARTHEST causes, ValueError when the lengths
    do not fit.  Source: Yao et al. 2025 (weights), Schulman 2020, "Approximating KL divergence" (k1, k3).
    """
    length_S = length_S.cpu().long()
    if trainer_T.shape != rollout_T.shape or trainer_T.numel() == 0 or int(length_S.sum()) != trainer_T.numel():
        raise ValueError(
            f"{trainer_T.numel()} and {rollout_T.numel()} log-probabilities for {int(length_S.sum())} tokens: "
            "equally many are needed, and at least one"
        )
    sequences = _reduce(trainer_T.double().cpu(), rollout_T.double().cpu(), length_S=length_S, cap=cap)
    buckets = []
    for low, high in zip((1, *(edge + 1 for edge in edges)), (*edges, None), strict=True):
        inside_S = (sequences.length_S >= low) & (sequences.length_S <= (high or math.inf))
        if bool(inside_S.any()):
            buckets.append(_bucket(sequences, inside_S, low=low, high=high))
    return MismatchByLength(_bucket(sequences, sequences.length_S > 0, low=1, high=None), tuple(buckets))


@dataclass(frozen=True)
class _Sequences:
    """What is left of each sequence: sums over its tokens (in the order of _reduce), the largest weight and
    differences."""

    row_S: Tensor
    """Its row in the batch."""
    length_S: Tensor
    sums_SC: Tensor
    weight_max_S: Tensor
    diff_max_S: Tensor
    largest_S: Tensor
    position_S: Tensor
    """Position of the largest difference."""
    ppl_gap_S: Tensor


def _reduce(trainer_T: Tensor, rollout_T: Tensor, *, length_S: Tensor, cap: float | None) -> _Sequences:
    row_S = length_S.nonzero().flatten()
    length_S = length_S[row_S]
    x_T = trainer_T - rollout_T
    w_T, d_T = x_T.exp(), torch.expm1(x_T)
    above_T = torch.zeros_like(x_T) if cap is None else (w_T > cap).double()
    diff_T = (trainer_T.exp() - rollout_T.exp()).abs()
    columns = (x_T, w_T, w_T * w_T, d_T, d_T * d_T, d_T - x_T, above_T, diff_T, trainer_T, rollout_T)
    sums_SC = torch.stack([torch.segment_reduce(each_T, "sum", lengths=length_S) for each_T in columns], dim=1)
    ppl_S2 = (-sums_SC[:, -2:] / length_S[:, None]).exp()
    if not bool(torch.isfinite(sums_SC).all() & torch.isfinite(ppl_S2).all()):  # a sum keeps what is not finite
        raise NumericsError("a log-probability of this step's rollouts is not finite, or far from any that is sampled")
    most_S = torch.segment_reduce(x_T.abs(), "max", lengths=length_S)
    is_most_T = x_T.abs() == most_S.repeat_interleave(length_S)
    place_T = torch.arange(len(x_T), dtype=torch.float64).where(is_most_T, math.inf)  # exact up to 2^53
    place_S = torch.segment_reduce(place_T, "min", lengths=length_S).long()
    return _Sequences(
        row_S=row_S,
        length_S=length_S,
        sums_SC=sums_SC,
        weight_max_S=torch.segment_reduce(w_T, "max", lengths=length_S),
        diff_max_S=torch.segment_reduce(diff_T, "max", lengths=length_S),
        largest_S=x_T[place_S],
        position_S=place_S - (length_S.cumsum(0) - length_S),
        ppl_gap_S=ppl_S2[:, 0] - ppl_S2[:, 1],
    )


def _bucket(sequences: _Sequences, inside_S: Tensor, *, low: int, high: int | None) -> LengthBucket:
    num_tokens = int(sequences.length_S[inside_S].sum())
    means = sequences.sums_SC[inside_S].sum(dim=0) / num_tokens
    x, w, w_squared, d, d_squared, k3, above_cap, diff, *_ = means.tolist()
    largest = sequences.largest_S[inside_S].abs().argmax()
    return LengthBucket(
        min_tokens=low,
        max_tokens=high,
        num_sequences=int(inside_S.sum()),
        num_tokens=num_tokens,
        kl=-x,
        k3_kl=k3,
        probs_diff_mean=diff,
        probs_diff_max=float(sequences.diff_max_S[inside_S].max()),
        weight_mean=w,
        weight_std=math.sqrt(max(0.0, d_squared - d**2)),  # rounding can reach below 0
        weight_max=float(sequences.weight_max_S[inside_S].max()),
        ess=min(1.0, w**2 / w_squared),  # and above 1
        truncated_fraction=above_cap,
        ppl_gap=float(sequences.ppl_gap_S[inside_S].mean()),
        chi2=d_squared + 2 * d,
        largest=LargestDifference(
            nats=float(sequences.largest_S[inside_S][largest]),
            sequence=int(sequences.row_S[inside_S][largest]),
            position=int(sequences.position_S[inside_S][largest]),
        ),
    )


@dataclass(frozen=True)
class DifferingToken:
    """A token of a step whose log-prob in the trainer is not the rollouts', where it is to be."""

    ids: list[int]
    """Tokens before it: prompt and response."""
    token: int
    trainer: float
    """Log-prob in the trainer, nats."""
    rollout: float
    """Log-prob in the rollouts, nats."""


Place = tuple[str, int]  # a layer, and a row of its output: a token of the sequence


@dataclass
class LayerTrace:
    """Digests, values and log-prob of one sequence's forward, which runs alone."""

    values_at: Place | None = None
    """Place whose values are wanted."""
    digests: dict[str, list[str]] = field(default_factory=dict)
    """Digests of each layer's output, one per token, by the engine's names and in the order of the forward; the last
    layer has the last token only."""
    values: list[float] = field(default_factory=list)
    """Values at `values_at`."""
    log_prob: float = math.nan
    """Log-prob of a token after the sequence, nats."""

    def note(self, name: str, output: Tensor) -> None:
        """Note the output of a layer, [T, ...]. Equal values have one digest, in whatever type: 0 and -0 too."""
        rows_TN = output.detach().reshape(len(output), -1).float() + 0.0
        self.digests[name] = [hashlib.blake2b(row_N, digest_size=8).hexdigest() for row_N in rows_TN.numpy()]
        if self.values_at is not None and self.values_at[0] == name:
            self.values = rows_TN[self.values_at[1]].tolist()


def first_difference(ours: Mapping[str, list[str]], *, theirs: Mapping[str, list[str]]) -> Place | None:
    """Find in two traces' digests the first layer of the forward that differs anywhere, and its first token that
    does."""
    for name, digests in ours.items():
        for token, (one, other) in enumerate(zip(digests, theirs[name], strict=True)):
            if one != other:
                return name, token
    return None


def finite_pairs(trainer: Tensor, rollout: Tensor) -> Tensor:
    """Find where both log-probs are what `measure_by_length` takes."""
    return (trainer.abs() <= FARTHEST) & (rollout.abs() <= FARTHEST)


def with_finite_pairs(trainer: Tensor, rollout: Tensor) -> tuple[Tensor, Tensor]:
    """Put both at 0 nats where they are no finite pair: nothing may be learned from such a step, but its numbers must
    pass through what follows."""
    good = finite_pairs(trainer, rollout)
    return trainer.where(good, 0.0), rollout.where(good, 0.0)


@dataclass(frozen=True)
class TopWords:
    """The K most likely words at each token that an engine generated, most likely first: what whole distributions are
    compared by (corrections/distributions.py), on its way from the engine to the trainer."""

    ids_TK: NDArray[np.int32]
    log_probs_TK: NDArray[np.float32]
    """Log-probs of the words, nats, after temperature."""

    def first(self, tokens: int) -> TopWords:
        return TopWords(self.ids_TK[:tokens], self.log_probs_TK[:tokens])

    def followed_by(self, other: TopWords) -> TopWords:
        pairs = ((self.ids_TK, other.ids_TK), (self.log_probs_TK, other.log_probs_TK))
        return TopWords(*(np.concatenate(pair) for pair in pairs))

    def spread(self, mask: Sequence[int]) -> TopWords:
        """Return the same words with rows of 0 where the mask is 0: its ones are these tokens."""
        places = np.flatnonzero(mask)
        ids_TK = np.zeros((len(mask), self.ids_TK.shape[1]), np.int32)
        log_probs_TK = np.zeros(ids_TK.shape, np.float32)
        ids_TK[places], log_probs_TK[places] = self.ids_TK, self.log_probs_TK
        return TopWords(ids_TK, log_probs_TK)

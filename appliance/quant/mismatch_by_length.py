"""Where the mismatch sits: the same statistics for the whole step and for its sequences by length.

Legend: T response tokens of one step, sequence after sequence, padding already removed; S sequences.
    x_T = log p_trainer - log p_rollout     nats
    d_T = exp(x_T) - 1                      the importance weight before truncation, less one
Every statistic is a function of sums of x, d, d^2 and d - x over a group of tokens, taken in float64:
    kl   = -mean(x)                         weight mean = 1 + mean(d)
    k3   = mean(d - x)                      weight std  = sqrt(mean(d^2) - mean(d)^2)
    chi2 = mean(d^2) + 2 mean(d)            = mean(w^2) - 1, the chi-square divergence of the trainer from the rollout
    ess  = (1 + mean(d))^2 / (1 + chi2)
d and not w, because w is near 1: a spread of 1e-6 is lost in the last digits of w^2, and is 1e-12 in d^2.
    ppl_gap = mean over sequences of exp(-mean(log p_trainer)) - exp(-mean(log p_rollout)), positive where the trainer
              is the less sure of what was sampled
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from appliance.errors import NumericsError
from appliance.quant.mismatch import NOT_FINITE

BUCKET_EDGES = (16, 64, 256, 1024, 4096, 16384)  # tokens; the longest sequence of each bucket, the last has no end
_SUMS = ("x", "d", "d_squared", "k3", "above_cap", "trainer", "rollout")


@dataclass(frozen=True)
class LargestDifference:
    """The token on which the two policies differ most. nats: log p_trainer - log p_rollout.

    sequence: its row in the batch.  position: its place among the sequence's response tokens.  Both from 0; the first
    of several that are equally far apart.
    """

    nats: float
    sequence: int
    position: int


@dataclass(frozen=True)
class LengthBucket:
    """Sequences of `min_tokens` to `max_tokens` response tokens (None: no end), and the mismatch of their tokens.

    Units in the module's legend; fractions 0..1; weights before truncation.
    """

    min_tokens: int
    max_tokens: int | None
    num_sequences: int
    num_tokens: int
    kl: float
    k3_kl: float
    weight_mean: float
    weight_std: float
    weight_max: float
    ess: float
    truncated_fraction: float
    ppl_gap: float
    chi2: float
    largest: LargestDifference


@dataclass(frozen=True)
class MismatchByLength:
    """whole: all sequences that have a token.  buckets: those that hold a sequence, the short ones first."""

    whole: LengthBucket
    buckets: tuple[LengthBucket, ...]


@dataclass(frozen=True)
class _Sequences:
    """What is left of each sequence: sums over its tokens, its largest weight, its largest difference.

    row_S: its row in the batch.  position_S: of the largest difference.
    """

    row_S: Tensor
    length_S: Tensor
    sums_SC: Tensor
    weight_max_S: Tensor
    largest_S: Tensor
    position_S: Tensor
    ppl_gap_S: Tensor


def measure_by_length(
    trainer_T: Tensor,
    *,
    rollout_T: Tensor,
    length_S: Tensor,
    cap: float | None,
    edges: tuple[int, ...] = BUCKET_EDGES,
) -> MismatchByLength:
    """The mismatch of a step and of its length buckets; the order of sequences and padding do not matter.

    trainer_T, rollout_T: [T] log-probabilities in nats, T > 0.  length_S: [S] int64, tokens of each sequence, sum T; a
    sequence without tokens counts nowhere.  cap: > 0, None where nothing is truncated.  edges: growing, tokens.
    Raises NumericsError when a value is not finite, ValueError when the lengths do not fit.
    """
    length_S = length_S.cpu().long()
    if trainer_T.shape != rollout_T.shape or trainer_T.numel() == 0 or int(length_S.sum()) != trainer_T.numel():
        raise ValueError(
            f"{trainer_T.numel()} and {rollout_T.numel()} log-probabilities for {int(length_S.sum())} tokens: "
            "equally many are needed, and at least one"
        )
    sequences = _reduce(trainer_T.double().cpu(), rollout_T.double().cpu(), length_S=length_S, cap=cap)
    whole = _bucket(sequences, torch.ones_like(sequences.row_S, dtype=torch.bool), low=1, high=None)
    lows, highs = (1, *(edge + 1 for edge in edges)), (*edges, None)
    found = []
    for low, high in zip(lows, highs, strict=True):
        inside_S = sequences.length_S >= low
        if high is not None:
            inside_S &= sequences.length_S <= high
        if bool(inside_S.any()):
            found.append(_bucket(sequences, inside_S, low=low, high=high))
    return MismatchByLength(whole=whole, buckets=tuple(found))


def _reduce(trainer_T: Tensor, rollout_T: Tensor, *, length_S: Tensor, cap: float | None) -> _Sequences:
    row_S = length_S.nonzero().flatten()
    length_S = length_S[row_S]
    x_T = trainer_T - rollout_T
    d_T = torch.expm1(x_T)
    above_T = torch.zeros_like(x_T) if cap is None else (x_T.exp() > cap).double()
    columns = (x_T, d_T, d_T * d_T, d_T - x_T, above_T, trainer_T, rollout_T)
    sums_SC = torch.stack([torch.segment_reduce(each_T, "sum", lengths=length_S) for each_T in columns], dim=1)
    ppl_S2 = (-sums_SC[:, -2:] / length_S[:, None]).exp()
    if not bool(torch.isfinite(sums_SC).all() & torch.isfinite(ppl_S2).all()):  # a sum keeps what is not finite
        raise NumericsError(NOT_FINITE)
    start_S = length_S.cumsum(0) - length_S
    place_S = _first_largest(x_T.abs(), length_S=length_S)
    return _Sequences(
        row_S=row_S,
        length_S=length_S,
        sums_SC=sums_SC,
        weight_max_S=torch.segment_reduce(d_T, "max", lengths=length_S) + 1,
        largest_S=x_T[place_S],
        position_S=place_S - start_S,
        ppl_gap_S=ppl_S2[:, 0] - ppl_S2[:, 1],
    )


def _first_largest(value_T: Tensor, *, length_S: Tensor) -> Tensor:
    """[S]: where in T each sequence has its largest value, the first of equal ones. value_T: finite."""
    largest_S = torch.segment_reduce(value_T, "max", lengths=length_S)
    is_largest_T = value_T == largest_S.repeat_interleave(length_S)
    place_T = torch.arange(len(value_T), dtype=torch.float64).where(is_largest_T, math.inf)  # exact up to 2^53
    return torch.segment_reduce(place_T, "min", lengths=length_S).long()


def _bucket(sequences: _Sequences, inside_S: Tensor, *, low: int, high: int | None) -> LengthBucket:
    num_tokens = int(sequences.length_S[inside_S].sum())
    mean = dict(zip(_SUMS, (sequences.sums_SC[inside_S].sum(dim=0) / num_tokens).tolist(), strict=True))
    chi2 = mean["d_squared"] + 2 * mean["d"]
    largest = sequences.largest_S[inside_S].abs().argmax()
    return LengthBucket(
        min_tokens=low,
        max_tokens=high,
        num_sequences=int(inside_S.sum()),
        num_tokens=num_tokens,
        kl=-mean["x"],
        k3_kl=mean["k3"],
        weight_mean=1 + mean["d"],
        weight_std=math.sqrt(max(0.0, mean["d_squared"] - mean["d"] ** 2)),  # rounding can reach below 0
        weight_max=float(sequences.weight_max_S[inside_S].max()),
        ess=min(1.0, (1 + mean["d"]) ** 2 / (1 + chi2)),  # and above 1
        truncated_fraction=mean["above_cap"],
        ppl_gap=float(sequences.ppl_gap_S[inside_S].mean()),
        chi2=chi2,
        largest=LargestDifference(
            nats=float(sequences.largest_S[inside_S][largest]),
            sequence=int(sequences.row_S[inside_S][largest]),
            position=int(sequences.position_S[inside_S][largest]),
        ),
    )

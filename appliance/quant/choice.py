"""Which layers stay in BF16, so that the mismatch meets a budget with the fewest multiplications in BF16. No torch.

A layer's contribution is what quantising it alone adds to the mismatch. Contributions nearly add up, so what is left
when some layers stay in BF16 is estimated by their share of all contributions. Two values are exact: with none kept the
whole mismatch is left, and with all kept nothing is. Between them, and every trial that was measured, the estimate is a
line. It proposes the next trial, and a measurement of the whole model decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from appliance.quant.files import Predicted

_TRIALS = 3  # of a whole model: each is a pass over the text
_NEAR_ENOUGH = 0.8  # of the budget: what is left buys few multiplications
_AIM = 0.9  # of the budget: rounding to BF16 stays, whatever is kept, and the estimate does not know it
_Layer = tuple[str, ...]


@dataclass(frozen=True)
class Candidate:
    """A quantised layer of the engine."""

    layer: _Layer
    """Names of the layer in an `ignore` list."""
    contribution: float
    """Mismatch that quantising the layer alone adds, nats per token."""
    multiplications: int
    """Number of multiplications for one token."""

    @property
    def gain(self) -> float:
        """Mismatch that leaving the layer in BF16 takes away, for each multiplication."""
        return self.contribution / max(1, self.multiplications)


def candidates_of(layers: Iterable[Mapping[str, Any]]) -> list[Candidate]:
    """Return the candidates of a profile, each of them once. layers: of its header; those without a contribution are
    none."""
    parts: dict[_Layer, list[Mapping[str, Any]]] = {}
    for layer in layers:
        if layer["contribution"] is not None:
            parts.setdefault(tuple(layer["layer"]), []).append(layer)
    return [
        Candidate(names, gemms[0]["contribution"], sum(gemm["multiplications"] for gemm in gemms))
        for names, gemms in parts.items()
    ]


def choose_fewest(
    candidates: Sequence[Candidate], *, kl: float, budget: float, measured: Mapping[float, float] | None = None
) -> tuple[Candidate, ...]:
    """Choose the layers to keep in BF16, the most useful first. kl: nats per token with none of them kept.  budget: at
    most. measured: nats per token of trials, by the share of all contributions that their kept layers have."""
    points = sorted({**(measured or {}), 0.0: kl, 1.0: 0.0}.items())
    total = sum(candidate.contribution for candidate in candidates)
    chosen: list[Candidate] = []
    in_order = sorted(candidates, key=lambda candidate: (-candidate.gain, candidate.layer))
    while _left(chosen, total=total, points=points) > budget and len(chosen) < len(in_order):
        chosen.append(in_order[len(chosen)])
    for candidate in reversed(chosen):  # the last one may have made up for some of those before it
        others = [other for other in chosen if other is not candidate]
        if _left(others, total=total, points=points) <= budget:
            chosen = others
    return tuple(chosen)


def _left(layers: Iterable[Candidate], *, total: float, points: Sequence[tuple[float, float]]) -> float:
    """Estimate the nats per token that are left, on the line between two points of (share, nats per token), which begin
    at 0 and end at 1."""
    kept_share = _contributed(layers, total=total)
    for (low, kl_low), (high, kl_high) in pairwise(points):
        if kept_share <= high:
            return kl_low + (kl_high - kl_low) * (kept_share - low) / (high - low)
    return points[-1][1]  # a sum that is rounded to more than 1


def _contributed(layers: Iterable[Candidate], *, total: float) -> float:
    """Share of all contributions, 0..1."""
    return sum(candidate.contribution for candidate in layers) / total if total > 0 else 0.0


def share_in_bf16(layers: Iterable[Candidate], *, candidates: Iterable[Candidate]) -> float:
    """Return the share of the multiplications that could be quantised and stay in BF16, 0..1."""
    total = sum(candidate.multiplications for candidate in candidates)
    return sum(candidate.multiplications for candidate in layers) / total if total else 0.0


def meet_budget(
    candidates: Sequence[Candidate],
    *,
    all_quantised: Predicted,
    budget: float,
    measure: Callable[[frozenset[str]], Predicted],
) -> tuple[frozenset[str], Predicted]:
    """Find the names of the layers to keep in BF16, and the mismatch that was measured with them: the cheapest trial
    that meets the budget, or the nearest one to it where none does, which `predicted.kl > budget` shows.

    measure: the mismatch with these names kept, by a pass over the text. At most three are made.
    """
    tried: dict[frozenset[str], tuple[float, Predicted]] = {frozenset(): (0.0, all_quantised)}
    total = sum(candidate.contribution for candidate in candidates)
    points: dict[float, float] = {}
    for _ in range(_TRIALS):
        chosen = choose_fewest(candidates, kl=all_quantised.kl, budget=_AIM * budget, measured=points)
        names = frozenset(name for candidate in chosen for name in candidate.layer)
        if names in tried:
            break
        measured = measure(names)
        tried[names] = (share_in_bf16(chosen, candidates=candidates), measured)
        if _NEAR_ENOUGH * budget <= measured.kl <= budget:
            break
        points[_contributed(chosen, total=total)] = measured.kl

    def rank(names: frozenset[str]) -> tuple[float, float, list[str]]:
        cost, measured = tried[names]
        return max(0.0, measured.kl - budget), cost, sorted(names)

    best = min(tried, key=rank)
    return best, tried[best][1]

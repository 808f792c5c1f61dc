"""What a step says of its health, and the judgement of its mismatch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from enum import StrEnum

from appliance.guard.policy import MismatchBounds


@dataclass(frozen=True)
class Signals:
    """One step. A value that is not finite counts as bad, one that is None was not measured and counts nowhere.

    k3_kl: nats per token.  weight_*: importance weights before truncation.  ess, truncated_fraction: 0..1 of tokens.
    grad_norm: before it is scaled down.  reward_mean: in the unit of the task's reward.  entropy: nats per token.
    equal_group_fraction: prompts whose samples are all the same, 0..1.  response_tokens_mean: tokens.
    nonfinite_fraction: tokens with a log-probability that is not finite, 0..1.
    """

    step: int
    k3_kl: float | None = None
    weight_mean: float | None = None
    weight_std: float | None = None
    weight_max: float | None = None
    ess: float | None = None
    truncated_fraction: float | None = None
    grad_norm: float | None = None
    reward_mean: float | None = None
    entropy: float | None = None
    equal_group_fraction: float | None = None
    response_tokens_mean: float | None = None
    nonfinite_fraction: float | None = None


class Relation(StrEnum):
    """How a value lies to its bound."""

    ABOVE = "above"
    BELOW = "below"
    NOT_FINITE = "not finite"


@dataclass(frozen=True)
class Cause:
    """A number behind a decision. bound: None where there is none to compare with."""

    signal: str
    value: float
    relation: Relation
    bound: float | None = None

    @property
    def text(self) -> str:
        """`k3_kl 0.021 above 0.015`."""
        against = "" if self.bound is None or self.relation is Relation.NOT_FINITE else f" {self.bound:.4g}"
        return f"{self.signal} {self.value:.4g} {self.relation}{against}"

    def json_values(self) -> dict[str, str | float | None]:
        """A value that is not finite becomes its name: JSON has no number for it."""
        raw = asdict(self)
        return {**raw, "value": self.value if math.isfinite(self.value) else str(self.value)}


class Health(StrEnum):
    """Of one step's mismatch. BETWEEN: outside what is fine, inside what is not bad.  UNKNOWN: nothing was measured."""

    FINE = "fine"
    BETWEEN = "between"
    BAD = "bad"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Judgement:
    """causes: of BAD, each signal that is bad; of FINE, each that was looked at; else none."""

    health: Health
    causes: tuple[Cause, ...] = ()


def judge(signals: Signals, *, bounds: MismatchBounds) -> Judgement:
    """The mismatch of one step: as bad as its worst signal."""
    values = {each.name: getattr(signals, each.name) for each in fields(bounds)}
    measured = {name: value for name, value in values.items() if value is not None}
    if not measured:
        return Judgement(Health.UNKNOWN)
    bad = [cause for name, value in measured.items() if (cause := outside(name, value, getattr(bounds, name).bad))]
    if bad:
        return Judgement(Health.BAD, tuple(bad))
    if any(outside(name, value, getattr(bounds, name).fine) for name, value in measured.items()):
        return Judgement(Health.BETWEEN)
    fine = (_inside(name, value, getattr(bounds, name).fine) for name, value in measured.items())
    return Judgement(Health.FINE, tuple(fine))


def outside(signal: str, value: float, limits: tuple[float, float]) -> Cause | None:
    """The cause when a value is not finite or outside its (lowest, highest), else None."""
    low, high = limits
    if not math.isfinite(value):
        return Cause(signal, value, Relation.NOT_FINITE)
    if value > high:
        return Cause(signal, value, Relation.ABOVE, high)
    if value < low:
        return Cause(signal, value, Relation.BELOW, low)
    return None


def _inside(signal: str, value: float, limits: tuple[float, float]) -> Cause:
    """How a value lies to the limit that is there: to the upper one where there are two."""
    low, high = limits
    if math.isfinite(high):
        return Cause(signal, value, Relation.BELOW, high)
    return Cause(signal, value, Relation.ABOVE, low if math.isfinite(low) else None)

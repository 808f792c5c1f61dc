"""The rungs of the governor, from only looking to stopping, and what each asks of the run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from appliance.guard.policy import Action, Policy
from appliance.terms.schemes import Scheme


class Rung(StrEnum):
    OBSERVE = "observe"
    WARN = "warn"
    TIGHTEN = "tighten"
    RAISE_PRECISION = "raise-precision"
    BF16 = "bf16"
    STOP = "stop"

    @property
    def action(self) -> Action | None:
        """What stepping onto it does; nothing is done by observing."""
        return None if self is Rung.OBSERVE else Action(self.value)


_ORDER = tuple(Rung)


@dataclass(frozen=True)
class Level:
    """A place on the ladder; RAISE_PRECISION has several. scheme and bf16_layer_fraction: of the rollouts, there."""

    rung: Rung
    scheme: Scheme
    bf16_layer_fraction: float = 0.0

    @property
    def text(self) -> str:
        """`raise-precision (int8, 25 % of layers in bf16)`."""
        if self.rung is not Rung.RAISE_PRECISION:
            return str(self.rung)
        return f"{self.rung} ({self.scheme}, {self.bf16_layer_fraction:.0%} of layers in bf16)"


@dataclass(frozen=True)
class Measures:
    """What holds while the governor stands on a level; from the next sync on.

    tight: whether the correction is its tightened form.
    """

    scheme: Scheme
    bf16_layer_fraction: float
    tight: bool
    stop: bool


def ladder(policy: Policy) -> tuple[Level, ...]:
    """The levels of a run, lowest first: OBSERVE and what the policy allows. BF16 rollouts have no precision to raise.

    Each level of precision keeps what those below it gained: a finer scheme comes with as many layers in BF16.
    """
    scheme, actions = policy.scheme, policy.actions
    levels = [Level(Rung.OBSERVE, scheme)]
    levels += [Level(rung, scheme) for rung in (Rung.WARN, Rung.TIGHTEN) if rung.action in actions]
    if Action.RAISE_PRECISION in actions and scheme.quantised:
        levels += [Level(Rung.RAISE_PRECISION, scheme, share) for share in policy.bf16_layer_fractions]
        most = policy.bf16_layer_fractions[-1] if policy.bf16_layer_fractions else 0.0
        levels += [Level(Rung.RAISE_PRECISION, finer, most) for finer in scheme.spec.finer]
    if Action.BF16 in actions and scheme.quantised:
        levels.append(Level(Rung.BF16, Scheme.BF16, 1.0))
    if Action.STOP in actions:
        levels.append(Level(Rung.STOP, levels[-1].scheme, levels[-1].bf16_layer_fraction))
    return tuple(levels)


def place(level: Level | None, *, levels: tuple[Level, ...]) -> int:
    """Where a level is on the ladder; None: the foot.

    When a changed policy has it no more: the top of its rung, or of the next lower one that is there.
    """
    if level is None:
        return 0
    if level in levels:
        return levels.index(level)
    return max(i for i, each in enumerate(levels) if _ORDER.index(each.rung) <= _ORDER.index(level.rung))


def measures(level: Level | None, *, policy: Policy) -> Measures:
    """What a level asks for, with what the allowed levels below it ask for. None: the foot of the ladder."""
    levels = ladder(policy)
    at = place(level, levels=levels)
    return Measures(
        scheme=levels[at].scheme,
        bf16_layer_fraction=levels[at].bf16_layer_fraction,
        tight=any(each.rung is Rung.TIGHTEN for each in levels[: at + 1]),
        stop=levels[at].rung is Rung.STOP,
    )

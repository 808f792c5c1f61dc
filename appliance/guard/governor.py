"""The guard of a run: judges it step by step and decides what is done. A pure state machine, no clock, no Ray. Its
answer to a mismatch is the governor, a ladder:

    observe -> warn -> tighten -> raise precision -> bf16 rollouts -> stop and save

Mismatch that stays bad climbs one level at a time, mismatch that stays fine descends one; the guards of signals.py
warn and stop beside the ladder. After a climb `cooling_steps` steps are not judged; what is between fine and bad
moves nothing. A descent is a trial: the first bad step leads back, and a level that had to be climbed again is left
twice as slowly.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from appliance.guard.policy import Action, Policy
from appliance.guard.signals import (
    Cause,
    CollapseGuard,
    MismatchHealth,
    Report,
    Signals,
    Watches,
    judge_mismatch,
    watch_guards,
)
from appliance.terms.counts import counted
from appliance.terms.schemes import Scheme

CHANGE_DELAY = 1  # steps after a decision whose rollouts were made before it takes effect
_MOST_DOUBLINGS = 6


# The ladder: from only looking to stopping, and what each rung asks of the run


class Rung(StrEnum):
    OBSERVE = "observe"
    WARN = "warn"
    TIGHTEN = "tighten"
    RAISE_PRECISION = "raise-precision"
    BF16 = "bf16"
    STOP = "stop"

    @property
    def action(self) -> Action | None:
        """Action that stepping onto the rung takes; None for observing."""
        return None if self is Rung.OBSERVE else Action(self.value)


_ORDER = tuple(Rung)


@dataclass(frozen=True)
class Level:
    """A place on the ladder; RAISE_PRECISION has several."""

    rung: Rung
    scheme: Scheme
    """Scheme of the rollouts at this level."""
    bf16_layer_fraction: float = 0.0
    """Share of the rollouts' layers that are in BF16 at this level."""

    @property
    def text(self) -> str:
        """`raise-precision (int8, 25 % of layers in bf16)`."""
        if self.rung is not Rung.RAISE_PRECISION:
            return str(self.rung)
        return f"{self.rung} ({self.scheme}, {self.bf16_layer_fraction:.0%} of layers in bf16)"


@dataclass(frozen=True)
class Measures:
    """Measures that a level of the governor takes, from the next sync on."""

    scheme: Scheme
    bf16_layer_fraction: float
    tight: bool
    """Whether the correction is its tightened form."""


def ladder(policy: Policy) -> tuple[Level, ...]:
    """Return the levels of a run, lowest first: OBSERVE and what the policy allows. BF16 rollouts have no precision to
    raise. Each level of precision keeps what those below it gained: a finer scheme comes with as many layers in
    BF16."""
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


def place_on_ladder(level: Level | None, *, levels: tuple[Level, ...]) -> int:
    """Return the place of a level on the ladder; None: the foot. When a changed policy has it no more: the top of its
    rung, or of the next lower one that is there."""
    if level is None:
        return 0
    if level in levels:
        return levels.index(level)
    return max(i for i, each in enumerate(levels) if _ORDER.index(each.rung) <= _ORDER.index(level.rung))


def measures_of_level(level: Level | None, *, policy: Policy) -> Measures:
    """Return the measures of a level, with those of the allowed levels below it. None: the foot of the ladder."""
    levels = ladder(policy)
    at = place_on_ladder(level, levels=levels)
    return Measures(
        scheme=levels[at].scheme,
        bf16_layer_fraction=levels[at].bf16_layer_fraction,
        tight=any(each.rung is Rung.TIGHTEN for each in levels[: at + 1]),
    )


# The governor


class Move(StrEnum):
    """UP, DOWN: on the ladder.  ALARM, CLEAR: a guard warns, and takes it back."""

    UP = "up"
    DOWN = "down"
    ALARM = "alarm"
    CLEAR = "clear"


@dataclass(frozen=True)
class Decision:
    """One transition and the numbers that caused it."""

    step: int
    move: Move
    action: Action | None
    """Action that is taken; None where one is taken back."""
    before: Level
    after: Level
    causes: tuple[Cause, ...]
    steps: int
    """Number of the last `judged_steps` steps that led to the decision."""
    judged_steps: int
    guard: CollapseGuard | None = None
    """Guard that decided, None for the ladder."""

    @property
    def text(self) -> str:
        """`step 12: warn -> tighten: k3_kl 0.021 above 0.015 (3 of 5 steps)`."""
        change = f"{self.before.text} -> {self.after.text}"
        if self.guard is not None:
            change = f"{self.guard.value.replace('_', ' ')}: {self.move if self.action is None else self.action}"
        numbers = f": {', '.join(cause.text for cause in self.causes)}" if self.causes else ""
        steps = counted(self.judged_steps, "step")
        count = f"{steps} in a row" if self.steps == self.judged_steps else f"{self.steps} of {steps}"
        remedy = f"; {self.guard.remedy}" if self.guard is not None and self.action is Action.WARN else ""
        return f"step {self.step}: {change}{numbers} ({count}){remedy}"


@dataclass(frozen=True)
class GovernorState:
    """Everything the governor remembers."""

    level: Level | None = None
    """Level of the ladder; None before the first move, which is its foot."""
    recent_bad: tuple[bool, ...] = ()
    """Verdicts of the last judged steps since the last move, oldest first: whether each of them was bad."""
    fine_steps: int = 0
    """Fine steps in a row."""
    cooling: int = 0
    """Number of coming steps that are not judged."""
    descended: bool = False
    """Whether the last move was down; on trial while recent_bad is shorter than the window, so a resume with a larger
    one tries again."""
    relapses: int = 0
    """Number of climbs that came right after a descent."""
    watches: Watches = field(default_factory=Watches)
    schema_version: Literal[2] = 2

    @property
    def stopped(self) -> bool:
        return self.level is not None and self.level.rung is Rung.STOP


def observe(state: GovernorState, signals: Signals, *, policy: Policy) -> tuple[GovernorState, tuple[Decision, ...]]:
    """Return the state after one more step, and what is decided; at most one move on the ladder and one decision per
    guard. Same input, same answer. A stopped governor decides nothing more."""
    if state.stopped:
        return state, ()
    watches, reports = watch_guards(
        state.watches, signals, limits=policy.collapse, calm_after=max(1, policy.cooling_steps)
    )
    state, levels = replace(state, watches=watches), ladder(policy)
    here = levels[place_on_ladder(state.level, levels=levels)]
    alarms = [each for each in reports if each.action is not Action.STOP and Action.WARN in policy.actions]
    decisions = [_decision(each, step=signals.step, before=here, after=here) for each in alarms]
    fatal = next((report for report in reports if report.action is Action.STOP), None)
    if fatal is not None and Action.STOP in policy.actions:
        stop = _decision(fatal, step=signals.step, before=here, after=levels[-1])
        return replace(state, level=levels[-1]), (*decisions, stop)
    state, move = _move(state, signals, policy=policy)
    return state, (*decisions, move) if move else (*decisions,)


def resume(state: GovernorState, *, policy: Policy) -> GovernorState:
    """Return the state with which another attempt of the run begins: as it was, but one that had stopped the run is one
    level lower and counts from the start. A stopped run that is resumed has to continue, and still be guarded."""
    if not state.stopped:
        return state
    levels = ladder(policy)
    below = levels[max(0, place_on_ladder(state.level, levels=levels) - (levels[-1].rung is Rung.STOP))]
    watches = replace(state.watches, watches=Watches().watches)
    return replace(
        state, level=below, recent_bad=(), fine_steps=0, cooling=policy.cooling_steps, descended=False, watches=watches
    )


def _decision(report: Report, *, step: int, before: Level, after: Level) -> Decision:
    move = {Action.WARN: Move.ALARM, None: Move.CLEAR, Action.STOP: Move.UP}[report.action]
    causes, steps = () if report.cause is None else (report.cause,), report.steps
    return Decision(step, move, report.action, before, after, causes, steps, judged_steps=steps, guard=report.guard)


def _move(state: GovernorState, signals: Signals, *, policy: Policy) -> tuple[GovernorState, Decision | None]:
    """Move on the ladder after one more step."""
    if state.cooling > 0:
        return replace(state, cooling=state.cooling - 1), None
    judgement = judge_mismatch(signals, bounds=policy.mismatch)
    if judgement.health is MismatchHealth.UNKNOWN:
        return state, None
    bad = judgement.health is MismatchHealth.BAD
    on_trial = state.descended and len(state.recent_bad) < policy.climb_window  # the steps judged since the move
    recent = (*state.recent_bad, bad)[-policy.climb_window :]
    fine = state.fine_steps + 1 if judgement.health is MismatchHealth.FINE else 0
    levels = ladder(policy)
    at = place_on_ladder(state.level, levels=levels)
    if bad and sum(recent) >= (1 if on_trial else policy.climb_bad) and at + 1 < len(levels):
        move, to, count, num_judged = Move.UP, levels[at + 1], sum(recent), len(recent)
    elif fine >= policy.descend_fine * 2 ** min(state.relapses, _MOST_DOUBLINGS) and at > 0:
        move, to, count, num_judged = Move.DOWN, levels[at - 1], fine, fine
    else:
        return replace(state, recent_bad=recent, fine_steps=fine), None
    up = move is Move.UP
    decision = Decision(
        signals.step,
        move,
        to.rung.action if up else None,
        levels[at],
        to,
        judgement.causes,
        steps=count,
        judged_steps=num_judged,
    )
    moved = replace(
        state,
        level=to,
        recent_bad=(),
        fine_steps=0,
        cooling=policy.cooling_steps if up else CHANGE_DELAY,
        descended=not up,
        relapses=state.relapses + (up and state.descended),
    )
    return moved, decision

"""The governor: watches a run step by step and decides what is done about it. A pure state machine, no clock, no Ray.

    observe -> warn -> tighten -> raise precision -> bf16 rollouts -> stop and save

Mismatch that stays bad climbs one level at a time, mismatch that stays fine descends one; the guards of collapse.py
warn and stop beside the ladder. After a climb `cooling_steps` steps are not judged; what is between fine and bad
moves nothing. A descent is a trial: the first bad step leads back, and a level that had to be climbed again is left
twice as slowly.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum

from appliance.guard.collapse import Guard, News, Report, Watch, Watches, watch
from appliance.guard.ladder import Level, Rung, ladder, place
from appliance.guard.policy import Action, Policy
from appliance.guard.signals import Cause, Health, Judgement, Signals, judge
from appliance.terms.schemes import Scheme

SCHEMA_VERSION = 2
CHANGE_DELAY = 1  # steps after a decision whose rollouts were made before it takes effect
_MOST_DOUBLINGS = 6


class Move(StrEnum):
    """UP, DOWN: on the ladder.  ALARM, CLEAR: a guard warns, and takes it back."""

    UP = "up"
    DOWN = "down"
    ALARM = "alarm"
    CLEAR = "clear"


@dataclass(frozen=True)
class Decision:
    """One transition and the numbers that caused it.

    action: what is done; None where something is taken back.  guard: whose, None for the ladder.
    steps: how many steps spoke for it, of the last `of` judged ones.
    """

    step: int
    move: Move
    action: Action | None
    before: Level
    after: Level
    causes: tuple[Cause, ...]
    steps: int
    of: int
    guard: Guard | None = None

    @property
    def text(self) -> str:
        """`step 12: warn -> tighten: k3_kl 0.021 above 0.015 (3 of 5 steps)`."""
        change = f"{self.before.text} -> {self.after.text}"
        if self.guard is not None:
            change = f"{self.guard.value.replace('_', ' ')}: {self.move if self.action is None else self.action}"
        numbers = f": {', '.join(cause.text for cause in self.causes)}" if self.causes else ""
        steps = "1 step" if self.of == 1 else f"{self.of} steps"
        count = f"{steps} in a row" if self.steps == self.of else f"{self.steps} of {steps}"
        return f"step {self.step}: {change}{numbers} ({count})"


@dataclass(frozen=True)
class GovernorState:
    """Everything the governor remembers. level: None before the first move, the foot of the ladder.

    recent_bad: of the last judged steps since the last move, oldest first.  fine_steps: in a row.
    cooling: steps left that are not judged.  descended: the last move was down; on trial while recent_bad is shorter
      than the window, so a resume with a larger one tries again.  relapses: climbs right after one.
    """

    level: Level | None = None
    recent_bad: tuple[bool, ...] = ()
    fine_steps: int = 0
    cooling: int = 0
    descended: bool = False
    relapses: int = 0
    watches: Watches = field(default_factory=Watches)

    @property
    def stopped(self) -> bool:
        return self.level is not None and self.level.rung is Rung.STOP

    def to_json(self) -> str:
        """Goes back through from_json to an equal state: every number in it is finite."""
        return json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> GovernorState:
        """Raises ValueError when the text is not a state of this version."""
        raw = json.loads(text)
        if not isinstance(raw, dict) or raw.pop("schema_version", None) != SCHEMA_VERSION:
            raise ValueError(f"not a governor's state of version {SCHEMA_VERSION}")
        try:
            level, memory = raw.pop("level"), raw.pop("watches")
            watches = Watches(
                rewards=tuple(memory["rewards"]),
                best_reward=memory["best_reward"],
                first_entropies=tuple(memory["first_entropies"]),
                watches=tuple(Watch(**each) for each in memory["watches"]),
            )
            if level is not None:
                level = Level(Rung(level["rung"]), Scheme(level["scheme"]), level["bf16_layer_fraction"])
            return cls(level=level, watches=watches, **{**raw, "recent_bad": tuple(raw["recent_bad"])})
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"a governor's state that cannot be read: {error}") from error


def observe(state: GovernorState, signals: Signals, *, policy: Policy) -> tuple[GovernorState, tuple[Decision, ...]]:
    """The state after one more step, and what is decided; at most one move on the ladder and one decision per guard.

    Same input, same answer. A stopped governor decides nothing more.
    """
    if state.stopped:
        return state, ()
    watches, reports = watch(state.watches, signals, limits=policy.collapse, calm_after=max(1, policy.cooling_steps))
    state = replace(state, watches=watches)
    fatal = next((report for report in reports if report.news is News.STOP), None)
    said = _alarms(state, reports, step=signals.step, policy=policy)
    if fatal is not None and Action.STOP in policy.actions:
        stopped, stop = _stop(state, fatal, step=signals.step, policy=policy)
        return stopped, (*said, stop)
    state, moves = _move(state, judge(signals, bounds=policy.mismatch), step=signals.step, policy=policy)
    return state, (*said, *moves)


def resume(state: GovernorState, *, policy: Policy) -> GovernorState:
    """The state that another attempt of the run begins with: as it was, but one that had stopped the run stands one
    level lower and counts anew. Who resumes a stopped run wants it to go on, and still guarded."""
    if not state.stopped:
        return state
    levels = ladder(policy)
    below = levels[max(0, place(state.level, levels=levels) - (levels[-1].rung is Rung.STOP))]
    watches = replace(state.watches, watches=Watches().watches)
    return replace(
        state, level=below, recent_bad=(), fine_steps=0, cooling=policy.cooling_steps, descended=False, watches=watches
    )


def _alarms(state: GovernorState, reports: tuple[Report, ...], *, step: int, policy: Policy) -> tuple[Decision, ...]:
    if Action.WARN not in policy.actions:
        return ()
    levels = ladder(policy)
    here = levels[place(state.level, levels=levels)]
    moves = {News.WARN: (Move.ALARM, Action.WARN), News.CLEAR: (Move.CLEAR, None)}
    return tuple(
        Decision(
            step,
            *moves[report.news],
            before=here,
            after=here,
            causes=() if report.cause is None else (report.cause,),
            steps=report.steps,
            of=report.steps,
            guard=report.guard,
        )
        for report in reports
        if report.news in moves
    )


def _stop(state: GovernorState, report: Report, *, step: int, policy: Policy) -> tuple[GovernorState, Decision]:
    levels = ladder(policy)
    decision = Decision(
        step,
        Move.UP,
        Action.STOP,
        before=levels[place(state.level, levels=levels)],
        after=levels[-1],
        causes=() if report.cause is None else (report.cause,),
        steps=report.steps,
        of=report.steps,
        guard=report.guard,
    )
    return replace(state, level=levels[-1]), decision


def _move(
    state: GovernorState, judgement: Judgement, *, step: int, policy: Policy
) -> tuple[GovernorState, tuple[Decision, ...]]:
    """The ladder after one more step."""
    if state.cooling > 0:
        return replace(state, cooling=state.cooling - 1), ()
    if judgement.health is Health.UNKNOWN:
        return state, ()
    bad = judgement.health is Health.BAD
    on_trial = state.descended and len(state.recent_bad) < policy.climb_window  # the steps judged since the move
    state = replace(
        state,
        recent_bad=(*state.recent_bad, bad)[-policy.climb_window :],
        fine_steps=state.fine_steps + 1 if judgement.health is Health.FINE else 0,
    )
    levels = ladder(policy)
    at = place(state.level, levels=levels)
    needed = policy.descend_fine * 2 ** min(state.relapses, _MOST_DOUBLINGS)
    to_climb = 1 if on_trial else policy.climb_bad
    if bad and sum(state.recent_bad) >= to_climb and at + 1 < len(levels):
        move, to, count, of = Move.UP, at + 1, sum(state.recent_bad), len(state.recent_bad)
    elif state.fine_steps >= needed and at > 0:
        move, to, count, of = Move.DOWN, at - 1, state.fine_steps, state.fine_steps
    else:
        return state, ()
    decision = Decision(
        step,
        move,
        levels[to].rung.action if move is Move.UP else None,
        before=levels[at],
        after=levels[to],
        causes=judgement.causes,
        steps=count,
        of=of,
    )
    return _moved(state, to=levels[to], move=move, policy=policy), (decision,)


def _moved(state: GovernorState, *, to: Level, move: Move, policy: Policy) -> GovernorState:
    up = move is Move.UP
    return replace(
        state,
        level=to,
        recent_bad=(),
        fine_steps=0,
        cooling=policy.cooling_steps if up else CHANGE_DELAY,
        descended=not up,
        relapses=state.relapses + (up and state.descended),
    )

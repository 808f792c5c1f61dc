"""What a step says of its health: the judgement of its mismatch, and the guards against training that goes wrong
whatever the mismatch (gradients, log-probs, reward, entropy, output). Pure.

Each guard has a condition on a step (with a short memory), and counts the steps in a row on which it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from itertools import accumulate
from typing import Annotated

from pydantic import AliasChoices, Field

from appliance.guard.policy import Action, Collapse, MismatchBounds, Patience
from appliance.terms.counts import counted
from appliance.terms.schemes import beside


@dataclass(frozen=True)
class Signals:
    """Signals of one step. A value that is not finite counts as bad, one that is None was not measured and does not
    count."""

    step: int
    differing_fraction: float | None = None
    """Share of the tokens whose two log-probs differ though they should be equal, 0..1."""
    k3_kl: float | None = None
    """Mean k3 of the tokens, nats per token."""
    weight_mean: float | None = None
    """Mean of the importance weights before truncation."""
    weight_std: float | None = None
    """Standard deviation of the importance weights before truncation."""
    ess: float | None = None
    """Effective sample size, as a share of the tokens, 0..1."""
    truncated_fraction: float | None = None
    """Share of the tokens whose weight is cut, 0..1."""
    grad_norm: float | None = None
    """Norm of the gradient before it is clipped."""
    reward_mean: float | None = None
    """Mean reward, in the unit of the task's reward."""
    entropy: float | None = None
    """Mean entropy, nats per token."""
    equal_group_fraction: float | None = None
    """Share of the prompts whose samples are all the same, 0..1."""
    unfinished_fraction: float | None = None
    """Share of the samples that reached the limit of a response before they ended, 0..1."""
    nonfinite_fraction: float | None = None
    """Share of the tokens with a log-probability that is not finite, 0..1."""


class BoundSide(StrEnum):
    """Position of a value relative to its bound."""

    ABOVE = "above"
    BELOW = "below"
    NOT_FINITE = "not finite"


@dataclass(frozen=True)
class Cause:
    """A number behind a decision."""

    signal: str
    value: float
    relation: BoundSide
    bound: float | None = None
    """Bound that the value is compared with, None where there is none."""

    @property
    def text(self) -> str:
        """Phrase for messages: `k3_kl 0.021 above 0.015`."""
        if self.bound is None or self.relation is BoundSide.NOT_FINITE:
            return f"{self.signal} {self.value:.4g} {self.relation}"
        bound = f"{self.bound:.4g}"
        return f"{self.signal} {beside(self.value, float(bound), form='.4g')} {self.relation} {bound}"

    def json_values(self) -> dict[str, str | float | None]:
        """Return the cause's numbers for JSON. A value that is not finite becomes its name, as JSON has no number for
        it."""
        raw = asdict(self)
        return {**raw, "value": self.value if math.isfinite(self.value) else str(self.value)}


class MismatchHealth(StrEnum):
    """Health of one step's mismatch. BETWEEN: outside what is fine, inside what is not bad.  UNKNOWN: nothing was
    measured."""

    FINE = "fine"
    BETWEEN = "between"
    BAD = "bad"
    UNKNOWN = "unknown"

    @property
    def word(self) -> str:
        """Word that people are shown: `fine` says that no signal is bad, and so is BETWEEN's."""
        return str(MismatchHealth.FINE if self is MismatchHealth.BETWEEN else self)


_OF_MISMATCH = tuple(field.name for field in fields(MismatchBounds))


@dataclass(frozen=True)
class MismatchJudgement:
    health: MismatchHealth
    causes: tuple[Cause, ...] = ()
    """Causes: for BAD every signal that is bad, for FINE every signal that was judged, else none."""


def judge_mismatch(signals: Signals, *, bounds: MismatchBounds) -> MismatchJudgement:
    """Judge the mismatch of one step: it is as bad as its worst signal."""
    measured = {name: value for name in _OF_MISMATCH if (value := getattr(signals, name)) is not None}
    if not measured:
        return MismatchJudgement(MismatchHealth.UNKNOWN)
    bad = [cause for name, value in measured.items() if (cause := find_cause(name, value, getattr(bounds, name).bad))]
    if bad:
        return MismatchJudgement(MismatchHealth.BAD, tuple(bad))
    if any(find_cause(name, value, getattr(bounds, name).fine) for name, value in measured.items()):
        return MismatchJudgement(MismatchHealth.BETWEEN)
    fine = (_inside(name, value, getattr(bounds, name).fine) for name, value in measured.items())
    return MismatchJudgement(MismatchHealth.FINE, tuple(fine))


def find_cause(signal: str, value: float, limits: tuple[float, float]) -> Cause | None:
    """Return the cause when a value is not finite or outside its (lowest, highest), else None."""
    low, high = limits
    if not math.isfinite(value):
        return Cause(signal, value, BoundSide.NOT_FINITE)
    if value > high:
        return Cause(signal, value, BoundSide.ABOVE, high)
    if value < low:
        return Cause(signal, value, BoundSide.BELOW, low)
    return None


def _inside(signal: str, value: float, limits: tuple[float, float]) -> Cause:
    """Compare a value with the limit that is there: with the upper one where there are two."""
    low, high = limits
    if math.isfinite(high):
        return Cause(signal, value, BoundSide.BELOW, high)
    return Cause(signal, value, BoundSide.ABOVE, low if math.isfinite(low) else None)


# Guards


class CollapseGuard(StrEnum):
    """Guards beside the ladder, by the names of `Collapse`'s patiences."""

    GRADIENT = "gradient"
    LOG_PROBS = "log_probs"
    REWARD = "reward"
    ENTROPY = "entropy"
    EQUAL_SAMPLES = "equal_samples"
    RUNAWAY_LENGTH = "runaway_length"

    @property
    def remedy(self) -> str:
        """Remedy that a warning names."""
        return _REMEDIES[self]


_REMEDIES = {
    CollapseGuard.GRADIENT: "lower optimizer.learning_rate",
    CollapseGuard.LOG_PROBS: "lower optimizer.learning_rate",
    CollapseGuard.REWARD: "resume from an earlier checkpoint with a lower optimizer.learning_rate",
    CollapseGuard.ENTROPY: "set algorithm.entropy_bonus, or take more diverse problems",
    CollapseGuard.EQUAL_SAMPLES: "raise rollout.temperature, take other problems, or lower optimizer.learning_rate",
    CollapseGuard.RUNAWAY_LENGTH: "raise task.max_response_tokens, or reward shorter answers",
}


@dataclass(frozen=True)
class Watch:
    """One guard's memory."""

    steps_met: Annotated[int, Field(validation_alias=AliasChoices("steps_met", "held"))] = 0
    """Number of steps in a row with the guard's condition. `held` is its key in a guard.json of an earlier version."""
    calm: int = 0
    """Number of steps in a row without the guard's condition."""
    alarmed: bool = False
    """Whether the guard has warned."""


@dataclass(frozen=True)
class Watches:
    """The memory of all guards. Only finite numbers are kept."""

    rewards: tuple[float, ...] = ()
    """Mean rewards of the last steps."""
    first_rewards: tuple[float, ...] = ()
    """Mean rewards of the first steps."""
    best_reward: float | None = None
    """Largest mean reward over reward_window steps."""
    first_entropies: tuple[float, ...] = ()
    """Entropies of the first steps."""
    watches: tuple[Watch, ...] = (Watch(),) * len(CollapseGuard)
    """One per Guard, in its order."""

    def __post_init__(self) -> None:
        if len(self.watches) != len(CollapseGuard):
            raise ValueError(f"{len(CollapseGuard)} guards cannot continue from the memory of {len(self.watches)}")


@dataclass(frozen=True)
class Report:
    """Report of a guard after a step."""

    guard: CollapseGuard
    action: Action | None
    """Action: WARN, STOP, or None, which says that the condition has not held for a while."""
    steps: int
    """Number of steps in a row with the condition; where it is clear, of steps without it, and with no cause."""
    cause: Cause | None = None


def watch_guards(
    before: Watches, signals: Signals, *, limits: Collapse, calm_after: int
) -> tuple[Watches, tuple[Report, ...]]:
    """Return the guards' memory and reports after one more step; a guard whose signal was not measured stays as it was.

    calm_after: steps in a row without its condition after which a guard that has warned says so.
    A guard that reaches its last step reports STOP on every further one: whether the run stops is the governor's.
    """
    memory = _remember(before, signals, limits=limits)
    watches, reports = [], []
    for guard, last in zip(CollapseGuard, memory.watches, strict=True):
        signal, condition = _CONDITIONS[guard]
        value = getattr(signals, signal)
        if value is None:
            watches.append(last)
            continue
        is_finite = math.isfinite(value)
        cause = condition(value, memory, limits) if is_finite else Cause(signal, value, BoundSide.NOT_FINITE)
        if cause is not None and is_finite and guard in _ALSO_WHEN_SOLVED and _solved(memory, limits=limits):
            watches.append(Watch(alarmed=last.alarmed))  # it neither counts nor says that the condition is gone
            continue
        patience = getattr(limits, guard.value)
        now, actions = _advance(last, holds=cause is not None, patience=patience, calm_after=calm_after)
        watches.append(now)
        reports += [Report(guard, action, steps=now.steps_met or now.calm, cause=cause) for action in actions]
    return replace(memory, watches=tuple(watches)), tuple(reports)


def _advance(
    before: Watch, *, holds: bool, patience: Patience, calm_after: int
) -> tuple[Watch, tuple[Action | None, ...]]:
    if not holds:
        calm = before.calm + 1
        clear = before.alarmed and calm >= calm_after
        return Watch(calm=calm, alarmed=before.alarmed and not clear), (None,) if clear else ()
    steps_met = before.steps_met + 1
    warns = not before.alarmed and steps_met >= patience.warn_after
    actions = (Action.WARN,) * warns + (Action.STOP,) * (steps_met >= patience.stop_after)
    return Watch(steps_met=steps_met, alarmed=before.alarmed or warns), actions


def _remember(before: Watches, signals: Signals, *, limits: Collapse) -> Watches:
    rewards, best, entropies = before.rewards, before.best_reward, before.first_entropies
    first = before.first_rewards
    if signals.reward_mean is not None and math.isfinite(signals.reward_mean):
        rewards = (*rewards, signals.reward_mean)[-limits.reward_window :]
        first = first if len(first) == limits.reward_window else (*first, signals.reward_mean)
        if len(rewards) == limits.reward_window:
            best = max(_mean(rewards), -math.inf if best is None else best)
    if signals.entropy is not None and math.isfinite(signals.entropy) and len(entropies) < limits.entropy_window:
        entropies = (*entropies, signals.entropy)
    return replace(before, rewards=rewards, first_rewards=first, best_reward=best, first_entropies=entropies)


def _log_probs(value: float, memory: Watches, limits: Collapse) -> Cause | None:
    return find_cause("nonfinite_fraction", value, (0.0, 0.0))


def _reward(value: float, memory: Watches, limits: Collapse) -> Cause | None:
    if memory.best_reward is None or len(memory.rewards) < limits.reward_window:
        return None
    floor = _floor(memory, limits=limits)
    gained = memory.best_reward - floor
    if limits.reward_ceiling is not None:
        is_noise = gained < limits.reward_least_gain * (limits.reward_ceiling - floor)
    else:
        is_noise = gained <= _noise(memory)
    if is_noise:
        return None
    lowest = memory.best_reward - limits.reward_lost_fraction * gained
    return find_cause(
        f"reward_mean of {counted(limits.reward_window, 'step')}", _mean(memory.rewards), (lowest, math.inf)
    )


def _entropy(value: float, memory: Watches, limits: Collapse) -> Cause | None:
    if len(memory.first_entropies) < limits.entropy_window:
        return None
    lowest = limits.entropy_left_fraction * _mean(memory.first_entropies)
    return find_cause("entropy", value, (lowest, math.inf))


def _equal_samples(value: float, memory: Watches, limits: Collapse) -> Cause | None:
    return find_cause("equal_group_fraction", value, (-math.inf, limits.equal_above))


def _runaway_length(value: float, memory: Watches, limits: Collapse) -> Cause | None:
    return find_cause("unfinished_fraction", value, (-math.inf, limits.unfinished_above))


_ALSO_WHEN_SOLVED = {CollapseGuard.ENTROPY, CollapseGuard.EQUAL_SAMPLES, CollapseGuard.RUNAWAY_LENGTH}
"""Guards whose condition is also met when a task is solved."""

_CONDITIONS: dict[CollapseGuard, tuple[str, Callable[[float, Watches, Collapse], Cause | None]]] = {
    CollapseGuard.GRADIENT: ("grad_norm", lambda *_: None),  # any that is finite will do
    CollapseGuard.LOG_PROBS: ("nonfinite_fraction", _log_probs),
    CollapseGuard.REWARD: ("reward_mean", _reward),
    CollapseGuard.ENTROPY: ("entropy", _entropy),
    CollapseGuard.EQUAL_SAMPLES: ("equal_group_fraction", _equal_samples),
    CollapseGuard.RUNAWAY_LENGTH: ("unfinished_fraction", _runaway_length),
}
"""Signal of each guard, and the function that returns what is wrong with a finite value of it."""


def _solved(memory: Watches, *, limits: Collapse) -> bool:
    floor, highest = _floor(memory, limits=limits), limits.reward_ceiling
    if highest is None:
        highest = memory.best_reward
        if highest is None or not memory.first_rewards or highest - _mean(memory.first_rewards) <= _noise(memory):
            return False
    return bool(memory.rewards) and _mean(memory.rewards) >= floor + limits.solved_fraction * (highest - floor)


def _floor(memory: Watches, *, limits: Collapse) -> float:
    if limits.reward_ceiling is not None or not memory.first_rewards:
        return limits.reward_floor
    return min(limits.reward_floor, _mean(memory.first_rewards))


def _noise(memory: Watches) -> float:
    """Compute how far the reward fell within the first steps: what only rises there learns, and its range would be a
    gain."""
    highest = accumulate(memory.first_rewards, max)
    return max((high - value for high, value in zip(highest, memory.first_rewards, strict=True)), default=math.inf)


def _mean(values: tuple[float, ...]) -> float:
    try:
        return math.fsum(values) / len(values)
    except OverflowError:  # of numbers near the largest that there is
        return math.fsum(value / len(values) for value in values)

"""Guards against training that goes wrong whatever the mismatch: gradients, log-probs, reward, entropy, output.

Each guard has a condition on a step (with a short memory), and counts the steps in a row on which it holds. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from appliance.guard.policy import Collapse, Patience
from appliance.guard.signals import Cause, Relation, Signals


class Guard(StrEnum):
    """The names are those of `Collapse`'s patiences."""

    GRADIENT = "gradient"
    LOG_PROBS = "log_probs"
    REWARD = "reward"
    ENTROPY = "entropy"
    EQUAL_SAMPLES = "equal_samples"
    RUNAWAY_LENGTH = "runaway_length"


@dataclass(frozen=True)
class Watch:
    """One guard's memory. held, calm: steps in a row with and without its condition.  alarmed: it has warned."""

    held: int = 0
    calm: int = 0
    alarmed: bool = False


@dataclass(frozen=True)
class Watches:
    """The memory of all guards. rewards: of the last steps.  best_reward: of means of reward_window steps.

    first_entropies: of the first steps.  Only finite numbers are kept.  watches: one per Guard, in its order.
    """

    rewards: tuple[float, ...] = ()
    best_reward: float | None = None
    first_entropies: tuple[float, ...] = ()
    watches: tuple[Watch, ...] = (Watch(),) * len(Guard)

    def __post_init__(self) -> None:
        if len(self.watches) != len(Guard):
            raise ValueError(f"{len(Guard)} guards cannot go on from the memory of {len(self.watches)}")


class News(StrEnum):
    """What a guard has to say after a step."""

    WARN = "warn"
    CLEAR = "clear"  # its condition has not held for a while
    STOP = "stop"


@dataclass(frozen=True)
class Report:
    """steps: in a row, with the condition; of CLEAR, without it, and no cause."""

    guard: Guard
    news: News
    steps: int
    cause: Cause | None = None


def watch(
    before: Watches, signals: Signals, *, limits: Collapse, calm_after: int
) -> tuple[Watches, tuple[Report, ...]]:
    """The guards after one more step.

    calm_after: steps in a row without its condition after which a guard that has warned says so.
    A guard that reaches its last step says STOP on every further one: whether the run stops is the governor's.
    """
    memory = _remember(before, signals, limits=limits)
    readings = _readings(memory, signals, limits=limits)
    watches, reports = [], []
    for guard, last in zip(Guard, memory.watches, strict=True):
        if guard not in readings:
            watches.append(last)
            continue
        cause, patience = readings[guard], getattr(limits, guard.value)
        now, news = _advance(last, holds=cause is not None, patience=patience, calm_after=calm_after)
        watches.append(now)
        reports += [Report(guard, each, steps=now.held or now.calm, cause=cause) for each in news]
    return replace(memory, watches=tuple(watches)), tuple(reports)


def _advance(before: Watch, *, holds: bool, patience: Patience, calm_after: int) -> tuple[Watch, tuple[News, ...]]:
    if not holds:
        calm = before.calm + 1
        clear = before.alarmed and calm >= calm_after
        return Watch(calm=calm, alarmed=before.alarmed and not clear), (News.CLEAR,) if clear else ()
    held = before.held + 1
    warns = not before.alarmed and held >= patience.warn_after
    news = (News.WARN,) * warns + (News.STOP,) * (held >= patience.stop_after)
    return Watch(held=held, alarmed=before.alarmed or warns), news


def _remember(before: Watches, signals: Signals, *, limits: Collapse) -> Watches:
    rewards, best, entropies = before.rewards, before.best_reward, before.first_entropies
    if _finite(signals.reward_mean):
        rewards = (*rewards, signals.reward_mean)[-limits.reward_window :]
        if len(rewards) == limits.reward_window:
            best = max(_mean(rewards), -math.inf if best is None else best)
    if _finite(signals.entropy) and len(entropies) < limits.entropy_window:
        entropies = (*entropies, signals.entropy)
    return replace(before, rewards=rewards, best_reward=best, first_entropies=entropies)


def _readings(memory: Watches, signals: Signals, *, limits: Collapse) -> dict[Guard, Cause | None]:
    """Per guard the cause when its condition holds, None when it does not. What was not measured is left out."""
    longest = limits.runaway_above * limits.max_response_tokens if limits.max_response_tokens else None
    readings = {
        Guard.GRADIENT: (signals.grad_norm, _not_finite("grad_norm", signals.grad_norm)),
        Guard.LOG_PROBS: (signals.nonfinite_fraction, _log_probs(signals.nonfinite_fraction)),
        Guard.REWARD: (signals.reward_mean, _reward(memory, signals.reward_mean, limits=limits)),
        Guard.ENTROPY: (signals.entropy, _entropy(memory, signals.entropy, limits=limits)),
        Guard.EQUAL_SAMPLES: (
            signals.equal_group_fraction,
            _too_much(memory, "equal_group_fraction", signals.equal_group_fraction, limits.equal_above, limits=limits),
        ),
        Guard.RUNAWAY_LENGTH: (
            signals.response_tokens_mean,
            _too_much(memory, "response_tokens_mean", signals.response_tokens_mean, longest, limits=limits),
        ),
    }
    return {guard: cause for guard, (value, cause) in readings.items() if value is not None}


def _log_probs(fraction: float | None) -> Cause | None:
    return Cause("nonfinite_fraction", fraction, Relation.ABOVE, 0.0) if fraction else None


def _reward(memory: Watches, value: float | None, *, limits: Collapse) -> Cause | None:
    if value is None or not math.isfinite(value):
        return _not_finite("reward_mean", value)
    if memory.best_reward is None or len(memory.rewards) < limits.reward_window:
        return None
    gained = memory.best_reward - limits.reward_floor
    lowest = memory.best_reward - limits.reward_lost_fraction * gained
    recent = _mean(memory.rewards)
    if gained < limits.reward_least_gain * (limits.reward_ceiling - limits.reward_floor) or recent >= lowest:
        return None
    return Cause(f"reward_mean of {limits.reward_window} steps", recent, Relation.BELOW, lowest)


def _entropy(memory: Watches, value: float | None, *, limits: Collapse) -> Cause | None:
    if value is None or not math.isfinite(value):
        return _not_finite("entropy", value)
    if len(memory.first_entropies) < limits.entropy_window or _solved(memory, limits=limits):
        return None
    lowest = limits.entropy_left_fraction * _mean(memory.first_entropies)
    return Cause("entropy", value, Relation.BELOW, lowest) if value < lowest else None


def _too_much(
    memory: Watches, signal: str, value: float | None, bound: float | None, *, limits: Collapse
) -> Cause | None:
    if value is None or not math.isfinite(value):
        return _not_finite(signal, value)
    if bound is None or value <= bound or _solved(memory, limits=limits):
        return None
    return Cause(signal, value, Relation.ABOVE, bound)


def _solved(memory: Watches, *, limits: Collapse) -> bool:
    high_enough = limits.reward_floor + limits.solved_fraction * (limits.reward_ceiling - limits.reward_floor)
    return bool(memory.rewards) and _mean(memory.rewards) >= high_enough


def _not_finite(signal: str, value: float | None) -> Cause | None:
    if value is None or math.isfinite(value):
        return None
    return Cause(signal, value, Relation.NOT_FINITE)


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _mean(values: tuple[float, ...]) -> float:
    try:
        return math.fsum(values) / len(values)
    except OverflowError:  # of numbers near the largest that there is
        return math.fsum(value / len(values) for value in values)

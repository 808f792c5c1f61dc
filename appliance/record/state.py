"""Where a run is: a state that events and metrics are folded into. Pure; the clock is an argument."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, replace

from appliance.record.events import Event, StepMetrics
from appliance.record.health import judge

_STEPS_FOR_AN_ESTIMATE = 20


@dataclass(frozen=True)
class Work:
    """A piece of work that says how far it is. since: unix s of its first report."""

    label: str
    done: float
    total: float
    note: str
    since: float
    at: float


@dataclass(frozen=True)
class RunState:
    """What is known of a run. Times are unix seconds, `step_ends_s` seconds since the trainer's start, rewards means.

    steps: how many are planned.  val_first / val_last: greedy validation before training / the newest.
    val_bf16: the newest in BF16, where that was measured beside it and rollouts were in another scheme.
    """

    steps: int
    started: float = 0.0
    phase: str = "starting"
    phase_since: float = 0.0
    work: Work | None = None
    last: StepMetrics | None = None
    rewards: tuple[float, ...] = ()
    tokens_per_s: tuple[float, ...] = ()
    step_ends_s: tuple[float, ...] = ()
    val_first: float | None = None
    val_last: float | None = None
    val_last_step: int = 0
    val_samples: int = 0
    val_bf16: float | None = None
    unhealthy_steps: int = 0
    note: str = ""
    attested: tuple[str, ...] = ()
    failure: Event | None = None
    stop: Event | None = None

    @property
    def step(self) -> int:
        """The last finished step, 0 before the first."""
        return self.last.step if self.last else 0


def fold(state: RunState, news: Event | StepMetrics) -> RunState:
    """The state after one more event or one more line of metrics."""
    return _fold_metrics(state, news) if isinstance(news, StepMetrics) else _fold_event(state, news)


def _fold_event(state: RunState, event: Event) -> RunState:
    state = state if state.started else replace(state, started=event.time, phase_since=event.time)
    match event.kind:
        case "phase":
            return replace(state, phase=event.what, phase_since=event.time, work=None)
        case "progress":
            return replace(state, work=_work(state.work, event))
        case "attest":
            return replace(state, attested=(*state.attested, event.what))
        case "note" | "guard" | "cluster":
            return replace(state, note=event.what)
        case "failure":
            return replace(state, failure=event)
        case "stop":
            return replace(state, stop=event)
        case "resume":
            begun = replace(state, phase="starting", phase_since=event.time, work=None)
            return replace(begun, failure=None, stop=None, attested=(), note=event.what)
        case _:
            return state


def _work(before: Work | None, event: Event) -> Work | None:
    if event.done is None or not event.total:
        return before
    same = before is not None and before.label == event.what
    since = before.since if same else event.time
    return Work(event.what, done=event.done, total=event.total, note=event.note, since=since, at=event.time)


def _fold_metrics(state: RunState, line: StepMetrics) -> RunState:
    state = _fold_validation(state, line)
    if line.reward_mean is None:
        return state
    speed = () if line.rollout_tokens_per_s is None else (line.rollout_tokens_per_s,)
    return replace(
        state,
        last=line,
        rewards=(*state.rewards, line.reward_mean),
        tokens_per_s=(*state.tokens_per_s, *speed),
        step_ends_s=(*state.step_ends_s, line.time_s)[-_STEPS_FOR_AN_ESTIMATE - 1 :],
        unhealthy_steps=state.unhealthy_steps + (not judge(line).healthy),
    )


def _fold_validation(state: RunState, line: StepMetrics) -> RunState:
    if line.val_reward_mean is None:
        return state
    first = line.val_reward_mean if line.step == 0 else state.val_first
    samples = state.val_samples if line.val_samples is None else int(line.val_samples)
    bf16 = None if line.scheme == "bf16" else line.val_reward_bf16_mean
    return replace(
        state,
        val_first=first,
        val_last=line.val_reward_mean,
        val_last_step=line.step,
        val_samples=samples,
        val_bf16=bf16,
    )


def median_tokens_per_s(state: RunState) -> float | None:
    return statistics.median(state.tokens_per_s) if state.tokens_per_s else None


def step_seconds(state: RunState) -> float | None:
    """The median time from one step's end to the next, over the last steps: validation and saving are in it."""
    ends = state.step_ends_s
    if len(ends) >= 2:
        return statistics.median(b - a for a, b in itertools.pairwise(ends))
    return state.last.step_s if state.last else None


def remaining_s(state: RunState, *, now: float) -> float | None:
    """Seconds of the steps that are left (of the work, where there is one), None when nothing tells.

    now: unix s.
    """
    if state.work is not None:
        return _remaining_work_s(state.work, now=now)
    seconds = step_seconds(state)
    return None if seconds is None else max(0, state.steps - state.step) * seconds


def _remaining_work_s(work: Work, *, now: float) -> float | None:
    spent = work.at - work.since
    if work.done <= 0 or spent <= 0:
        return None
    whole = spent / work.done * work.total
    return max(0.0, work.since + whole - now)

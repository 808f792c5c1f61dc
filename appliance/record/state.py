"""The state of a run, which events and metrics are folded into. Pure; the clock is an argument."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from appliance.guard.policy import MismatchBounds
from appliance.guard.signals import MismatchHealth, MismatchJudgement, Signals, judge_mismatch
from appliance.record.events import REWARD, VALIDATION, Event, StepMetrics

GREEDY = "greedy"
_STEPS_FOR_AN_ESTIMATE = 20
_ENDS = 5
_MOST_KEPT = 1000
_FROM_LINE = {  # signal of the mismatch -> key of the line that has it
    "k3_kl": "mismatch_k3_kl",
    "weight_mean": "is_weight_mean",
    "weight_std": "is_weight_std",
    "ess": "is_ess",
    "truncated_fraction": "is_above_cap_fraction",
}

Kept = TypeVar("Kept")
BySet = Mapping[str, Mapping[str, float]]  # `avg@<n>`, then `pass@<k>`, by the name of the validation


@dataclass(frozen=True)
class Work:
    """A piece of work that reports its progress."""

    label: str
    done: float
    total: float
    note: str
    since: float
    """Time of its first report, Unix s."""
    at: float


@dataclass(frozen=True)
class BoundedSeries(Generic[Kept]):
    """Items as they come, a bounded number of them.

    Folding a line then costs the same at every step. A tuple of all items would be copied at each: a run of 30,000
    steps, whose `status` is read again and again, would copy for seconds.
    """

    count: int = 0
    first: tuple[Kept, ...] = ()
    """First five items."""
    last: tuple[Kept, ...] = ()
    """Last five items."""
    some: tuple[Kept, ...] = ()
    """All items, and where there are many one in `every`."""
    every: int = 1

    def __bool__(self) -> bool:
        return self.count > 0

    def and_one(self, item: Kept) -> BoundedSeries[Kept]:
        some = self.some if self.count % self.every else (*self.some, item)
        is_full = len(some) > _MOST_KEPT
        return BoundedSeries(
            self.count + 1,
            (*self.first, item)[:_ENDS],
            (*self.last, item)[-_ENDS:],
            some[::2] if is_full else some,
            2 * self.every if is_full else self.every,
        )

    def with_last(self) -> tuple[Kept, ...]:
        """Return `some`, and the last item where it is none of them."""
        return (*self.some, *self.last[-1:]) if (self.count - 1) % self.every else self.some


@dataclass(frozen=True)
class RunState:
    """State of a run, as its events and metrics tell it. Times are Unix seconds, rewards are means."""

    steps: int
    """Steps that are planned."""
    bounds: MismatchBounds
    """Bounds of a step's mismatch: RunPlan.mismatch_bounds."""
    phase: str = "starting"
    phase_since: float = 0.0
    work: Work | None = None
    last: StepMetrics | None = None
    rewards: BoundedSeries[float] = BoundedSeries()
    tokens_per_s: BoundedSeries[float] = BoundedSeries()
    started: float = 0.0
    """Time of the first event: seconds of a run count from here."""
    begun_s: tuple[float, ...] = ()
    """Seconds at which later attempts began: of the newest ones."""
    step_ends_s: tuple[float, ...] = ()
    """Seconds at which steps ended: of the newest ones."""
    val_first: float | None = None
    """Greedy validation before training."""
    val_last: float | None = None
    """Greedy validation, the newest."""
    val_last_step: int = 0
    val_samples: int = 0
    val_how: str = GREEDY
    """Way in which the validation was sampled, as `val_how` names it."""
    sets_first: BySet = field(default_factory=dict)
    """Results of several validations, before training."""
    sets_last: BySet = field(default_factory=dict)
    """Results of several validations, the newest."""
    val_bf16: float | None = None
    """Newest validation in BF16, where one was made beside `val_last`, which was made in another scheme."""
    judged_steps: int = 0
    """Steps whose mismatch was measured."""
    bad_steps: int = 0
    """Steps whose mismatch is bad."""
    note: str = ""
    failure: Event | None = None
    stop: Event | None = None

    @property
    def step(self) -> int:
        """Last finished step, 0 before the first."""
        return self.last.step if self.last else 0


def fold(state: RunState, news: Event | StepMetrics) -> RunState:
    """Return the state after one more event or one more line of metrics."""
    if isinstance(news, StepMetrics):
        return _fold_metrics(state, news)
    event, state = news, state if state.started else _changed(state, started=news.time, phase_since=news.time)
    match event.kind:
        case "phase":
            return _changed(state, phase=event.what, phase_since=event.time, work=None)
        case "progress":
            return _changed(state, work=_work(state.work, event))
        case "note" | "guard" | "cluster":
            return _changed(state, note=event.what)
        case "failure":
            return _changed(state, failure=state.failure or event)  # as first_failure: later ones are its consequence
        case "stop":
            return _changed(state, stop=event)
        case "resume":
            begun = _changed(state, phase="starting", phase_since=event.time, work=None)
            begun_s = (*state.begun_s, event.time - state.started)[-_STEPS_FOR_AN_ESTIMATE:]
            return _changed(begun, failure=None, stop=None, note=event.what, begun_s=begun_s)
        case _:
            return state


def by_set(line: StepMetrics) -> BySet:
    """Return the results of several validations, the one that counts first; empty where there is one."""
    results: dict[str, dict[str, float]] = {}
    for key, value in line.user_metrics.items():
        if key.startswith(VALIDATION):
            name, _, metric = key.removeprefix(VALIDATION).rpartition("/")
            results.setdefault(name, {})[metric] = value
    return results


def val_how(line: StepMetrics) -> str:
    """Name how the validation that counts was sampled: `greedy`, or of several ones `<set> avg@<n>`."""
    return next((f"{name} {next(iter(metrics))}" for name, metrics in by_set(line).items()), GREEDY)


def rewards_of(line: StepMetrics) -> dict[str, float]:
    """Return the mean of each reward of a task of the user's own, by its name."""
    return {key.removeprefix(REWARD): value for key, value in line.user_metrics.items() if key.startswith(REWARD)}


def _work(before: Work | None, event: Event) -> Work | None:
    if event.done is None or not event.total:
        return before
    same = before is not None and before.label == event.what
    since = before.since if same else event.time
    return Work(event.what, done=event.done, total=event.total, note=event.note, since=since, at=event.time)


def _fold_metrics(state: RunState, line: StepMetrics) -> RunState:
    if line.val_reward_mean is not None:
        sets = by_set(line)
        state = _changed(
            state,
            val_first=line.val_reward_mean if line.step == 0 else state.val_first,
            val_last=line.val_reward_mean,
            val_last_step=line.step,
            val_samples=state.val_samples if line.val_samples is None else int(line.val_samples),
            val_bf16=None if line.validated_in == "bf16" else line.val_reward_bf16_mean,
            val_how=val_how(line),
            sets_first=sets if line.step == 0 else state.sets_first,
            sets_last=sets,
        )
    if line.reward_mean is None:
        return state
    speed, before = line.rollout_tokens_per_s, state.tokens_per_s
    health = judge_step(line, bounds=state.bounds).health
    return _changed(
        state,
        last=line,
        rewards=state.rewards.and_one(line.reward_mean),
        tokens_per_s=before if speed is None else before.and_one(speed),
        step_ends_s=(*state.step_ends_s, line.time_s)[-_STEPS_FOR_AN_ESTIMATE - 1 :],
        judged_steps=state.judged_steps + (health is not MismatchHealth.UNKNOWN),
        bad_steps=state.bad_steps + (health is MismatchHealth.BAD),
    )


def _changed(state: RunState, **values: object) -> RunState:
    """Replace values as dataclasses.replace does, in a fifth of its time: it is called for every line of a run."""
    changed = object.__new__(RunState)
    changed.__dict__.update(state.__dict__, **values)
    return changed


def median_tokens_per_s(state: RunState) -> float | None:
    return statistics.median(state.tokens_per_s.some) if state.tokens_per_s else None


def step_seconds(state: RunState) -> float | None:
    """Return the median time from one step's end to the next, over the last steps: validation and saving are in it, the
    pause before another attempt is not. Events may be folded before the metrics of earlier attempts."""
    ends = itertools.pairwise(state.step_ends_s)
    spans = [b - a for a, b in ends if not any(a <= begun < b for begun in state.begun_s)]
    if spans:
        return statistics.median(spans)
    return state.last.step_s if state.last else None


def remaining_s(state: RunState, *, now: float) -> float | None:
    """Estimate the seconds of the steps that are left (of the work, where there is one), None when nothing tells. now:
    unix s."""
    work = state.work
    if work is None:
        seconds = step_seconds(state)
        return None if seconds is None else max(0, state.steps - state.step) * seconds
    spent = work.at - work.since
    if work.done <= 0 or spent <= 0:
        return None
    return max(0.0, work.since + spent / work.done * work.total - now)


def judge_step(line: StepMetrics, *, bounds: MismatchBounds) -> MismatchJudgement:
    """Judge a line of metrics as the guard judged its step. bounds: RunPlan.mismatch_bounds. A signal that the line
    lacks does not count, as in lines of older code."""
    if line.nonfinite_fraction:  # then no number of the mismatch was finite, and each became null in the line
        return judge_mismatch(Signals(line.step, **dict.fromkeys(_FROM_LINE, math.nan)), bounds=bounds)
    must_be_equal = line.differing_tokens is not None and line.mismatch_equal_fraction is not None
    differing = 1 - line.mismatch_equal_fraction if must_be_equal else None
    values = {name: getattr(line, key) for name, key in _FROM_LINE.items()}
    return judge_mismatch(Signals(line.step, differing_fraction=differing, **values), bounds=bounds)

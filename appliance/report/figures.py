"""The figures of a run's page: curves over its steps, and what happened on the axis of time. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from appliance.guard.policy import ESS, K3_KL, WEIGHT_MEAN
from appliance.page.stacked import LANE_NAMES, Band, Lane, stacked_chart, time_chart
from appliance.page.svg import MOST, Bound, Chart, Mark, Point, Series, line_chart, thinned
from appliance.record.events import Event, StepMetrics
from appliance.record.state import by_set, rewards_of
from appliance.report import draw
from appliance.report.display import step_parts
from appliance.report.folder import RunView
from appliance.terms.schemes import Scheme

Value = Callable[[StepMetrics], float | None]

GIB = 1 << 30
_PARTS = {"rollout": 0, "log-probs": 5, "update": 2, "sync": 4, "rest": 7}  # of a step's time, with their colours
_WIDTH = 1180
_PREPARING, _LOADING, _TRAINING, _VALIDATING, _SAVING = "preparing", "loading", "training", "validating", "saving"
_COLOURS = {_PREPARING: 7, _LOADING: 5, _TRAINING: 2, _VALIDATING: 3, _SAVING: 4}
_DOING = {
    **dict.fromkeys(("starting", "preflight", "prepare", "scale", "profile"), _PREPARING),
    **dict.fromkeys(("start", "load-model", "load-engine", "restart-engines", "attest"), _LOADING),
    **dict.fromkeys(("rollout", "log-probs", "update", "sync"), _TRAINING),
    "validate": _VALIDATING,
    **dict.fromkeys(("save", "export"), _SAVING),
}
_LANES = (  # name, class of the frame's style, kinds of events
    ("checkpoints", "fine", ("checkpoint",)),
    ("guard", "warn", ("guard",)),
    ("notes", "open", ("note", "reward", "cluster", "clipping", "calibrated", "profile")),
    ("faults, stops", "bad", ("failure", "stall", "sweep", "stop", "restart")),
)
_BEGINNINGS = frozenset({"resume", "restart"})  # the first events of an attempt: whatever went on had ended before
_MOMENTS = frozenset({"phase", "failure", "stop", *_BEGINNINGS})
_NOT_LISTED = frozenset({"phase", "progress"})
_MOST_EVENTS = 400


def curves(view: RunView) -> list[tuple[str, list[str]]]:
    """Figures by heading."""
    return [
        ("What it learned", _learned(view)),
        ("How far the rollout policy is from the trainer's", [*_mismatch(view), *_quantised(view)]),
        ("What a step takes", _spent(view)),
    ]


def _learned(view: RunView) -> list[str]:
    marks, scheme = _attempt_marks(view), view.plan.rollout.label
    validation = [Series(scheme, _known(view.lines, lambda line: line.val_reward_mean), 0, dotted=True)]
    if scheme != str(Scheme.BF16):
        validation.append(Series("bf16", _known(view.lines, lambda line: line.val_reward_bf16_mean), 1, dotted=True))
    how = view.state.val_how if view.plan.task.val_sets else "greedy, unseen problems"
    return [
        _curve(view, Chart("Reward", "sampled, mean of a step", marks=marks), lambda s: s.reward_mean),
        *_by_name(
            view, Chart("Rewards", "each one's mean of a step", marks=marks, legend=True), rewards_of, dotted=False
        ),
        line_chart(Chart("Validation", how, marks=marks, legend=True), validation),
        *_by_name(view, Chart("Validations", "mean reward", marks=marks, legend=True), _of_sets("avg@"), dotted=True),
        *_by_name(
            view, Chart("Passed", "of several tries one", marks=marks, legend=True), _of_sets("pass@"), dotted=True
        ),
        _curve(view, Chart("Response", "tokens, mean", marks=marks, from_zero=True), lambda s: s.response_tokens_mean),
        _curve(view, Chart("Entropy", "nats per token", marks=marks), lambda s: s.entropy),
        _curve(view, Chart("Gradient norm", "before clipping", marks=marks, from_zero=True), lambda s: s.grad_norm),
        *_called(view),
    ]


def _called(view: RunView) -> list[str]:
    """Of a task with tools."""
    if all(step.turns_mean is None for step in view.steps):
        return []
    marks = _attempt_marks(view)
    chart = Chart("Tool calls", "of a sample, mean", marks=marks, from_zero=True, legend=True)
    calls = [Series("all", _points(view, lambda s: s.tool_calls_mean), 1), Series("right", _points(view, _right), 0)]
    turns = _curve(view, Chart("Turns", "of the model, mean", marks=marks), lambda s: s.turns_mean)
    return [line_chart(chart, calls), turns]


def _right(step: StepMetrics) -> float | None:
    """Calls of a sample that a tool answered without an error."""
    calls, failed = step.tool_calls_mean, step.tool_calls_failed_fraction
    return None if calls is None or failed is None else calls * (1 - failed)


def _of_sets(start: str) -> Callable[[StepMetrics], dict[str, float]]:
    """By `<set> avg@<n>` or `<set> pass@<k>`, of a line."""

    def found(line: StepMetrics) -> dict[str, float]:
        return {
            f"{name} {metric}": value
            for name, metrics in by_set(line).items()
            for metric, value in metrics.items()
            if metric.startswith(start)
        }

    return found


def _by_name(
    view: RunView, chart: Chart, values: Callable[[StepMetrics], dict[str, float]], *, dotted: bool
) -> list[str]:
    """A curve for each name that a line has; no figure where there is none. dotted: few lines have them."""
    names = dict.fromkeys(name for line in view.lines for name in values(line))
    if not names:
        return []
    curves = [
        Series(name, _known(view.lines, lambda line, name=name: values(line).get(name)), index, dotted=dotted)
        for index, name in enumerate(names)
    ]
    return [line_chart(chart, curves)]


def _mismatch(view: RunView) -> list[str]:
    marks = [*_attempt_marks(view), *_guard_marks(view)]
    low, high = WEIGHT_MEAN
    guard, of_k3 = view.plan.guard, [Bound(K3_KL, f"bound {K3_KL}")]
    if guard.actions and guard.k3_kl != K3_KL:
        of_k3.append(Bound(guard.k3_kl, f"guard.k3_kl {guard.k3_kl:g}"))
    of_ess = [Bound(ESS, f"bound {ESS}")]
    of_weights = [Bound(low, f"mean above {low:g}"), Bound(high, f"mean below {high:g}")]
    k3 = Chart("Mismatch, k3", "nats per token, logarithmic", logarithmic=True, bounds=of_k3, marks=marks)
    before = "before truncation, logarithmic"
    weights = Chart("Importance weights", before, logarithmic=True, bounds=of_weights, marks=marks, legend=True)
    mean, largest = _points(view, lambda s: s.is_weight_mean), _points(view, lambda s: s.is_weight_max)
    acted = Chart("Truncated", "share of the tokens that the correction acted on", marks=marks, from_zero=True)
    return [
        _curve(view, k3, lambda s: s.mismatch_k3_kl),
        _curve(view, Chart("Effective sample size", "share", bounds=of_ess, marks=marks), lambda s: s.is_ess),
        line_chart(weights, [Series("mean", mean, 0), Series("largest", largest, 1)]),
        _curve(view, acted, lambda s: s.is_truncated_fraction),
    ]


def _quantised(view: RunView) -> list[str]:
    """What weight updates did to the codes; nothing for a run whose rollouts are in BF16 throughout."""
    if all(step.codes_changed_fraction is None for step in view.steps):
        return []
    marks = [*_attempt_marks(view), *_guard_marks(view)]
    shown: tuple[tuple[str, str, Value], ...] = (
        ("Codes changed", "share, by an update", lambda s: s.codes_changed_fraction),
        ("Saturated codes", "share, at the largest value", lambda s: s.saturated_fraction),
        ("Scale drift", "mean |log(scale / first scale)|", lambda s: s.scale_drift),
        ("Quantisation error", "relative, of the worst layer", lambda s: s.layer_error_max),
    )
    return [_curve(view, Chart(title, unit, marks=marks, from_zero=True), value) for title, unit, value in shown]


def _spent(view: RunView) -> list[str]:
    marks = _attempt_marks(view)
    timed = [(float(step.step), step_parts(step)) for step in view.steps if step.step_s is not None]
    there = [name for name in _PARTS if any(known.get(name, 0.0) > 0 for _, known in timed)]
    rows = _together([(x, [max(0.0, known.get(name, 0.0)) for name in there]) for x, known in timed])
    speed = Chart("Rollout speed", "tokens per second", marks=marks, from_zero=True)
    split = Chart("Time of a step", "s", marks=marks, legend=True)
    return [
        _curve(view, speed, lambda s: s.rollout_tokens_per_s),
        stacked_chart(split, there, rows, colours=[_PARTS[name] for name in there]),
    ]


def _together(rows: Sequence[tuple[float, list[float]]]) -> list[tuple[float, list[float]]]:
    """Means of runs of steps where there are too many to draw."""
    size = max(1, -(-len(rows) // MOST))
    runs = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [
        (run[len(run) // 2][0], [sum(parts) / len(run) for parts in zip(*(each for _, each in run), strict=True)])
        for run in runs
    ]


def _attempt_marks(view: RunView) -> list[Mark]:
    """Where a later attempt went on: between the last step it found done and its own first one."""
    return [
        Mark(attempt.after + 0.5, f"attempt {attempt.number} goes on after step {attempt.after}")
        for attempt in view.attempts[1:]
    ]


def _guard_marks(view: RunView) -> list[Mark]:
    told = [event for event in view.events if event.kind == "guard" and event.step is not None]
    return [Mark(float(event.step or 0), event.what, kind="mark warn") for event in told]


def _curve(view: RunView, chart: Chart, value: Value) -> str:
    return line_chart(chart, [Series("value", _points(view, value), 0)])


def _points(view: RunView, value: Value) -> list[Point]:
    """Where a step has no value the curve breaks."""
    return thinned([(float(step.step), value(step)) for step in view.steps])


def _known(lines: Sequence[StepMetrics], value: Value) -> list[Point]:
    """Of what most lines do not have: the curve goes on over them."""
    return thinned([(float(line.step), known) for line in lines if (known := value(line)) is not None])


def timeline(view: RunView) -> list[str]:
    """Figures with one axis of time, seconds since the first event. Empty before that."""
    if not view.events:
        return []
    seconds = max(view.ended - view.started, 1.0)
    marks = [Mark(attempt.time - view.started, f"attempt {attempt.number}") for attempt in view.attempts[1:]]
    doing = list(bands(view))
    there = {band.name for band in doing}
    colours = [(colour, name) for name, colour in _COLOURS.items() if name in there]
    attempts = f"{len(view.attempts)} attempts; dashed lines are their starts" if marks else ""
    chart = Chart("What it was doing", attempts, marks=marks, width=_WIDTH)
    memory = Chart(
        "Memory",
        "GiB, proportional set size of all processes on the launcher's host",
        over_time=True,
        x_range=(0.0, seconds),
        from_zero=True,
        marks=marks,
        width=_WIDTH,
        height=180,
        left=LANE_NAMES,
    )
    points = thinned([(sample.time - view.started, sample.pss_bytes / GIB) for sample in view.memory])
    return [
        time_chart(chart, [Lane("doing", bands=doing), *_event_lanes(view)], seconds=seconds, colours=colours),
        line_chart(memory, [Series("memory, GiB", points, 0)]),
    ]


def bands(view: RunView) -> Iterator[Band]:
    """From each phase to the next one, to the failure or stop that ended it, or to the last sign of its attempt."""
    moments = [(place, event) for place, event in enumerate(view.events) if event.kind in _MOMENTS]
    for (_, event), (place, after) in itertools.zip_longest(moments, moments[1:], fillvalue=(0, None)):
        name = _DOING.get(event.what)
        if event.kind != "phase" or name is None:
            continue
        end = view.ended if after is None else after.time
        if after is not None and after.kind in _BEGINNINGS:
            end = view.events[place - 1].time
        yield Band(event.time - view.started, end - view.started, name, _COLOURS[name])


def _event_lanes(view: RunView) -> Iterator[Lane]:
    for name, style, kinds in _LANES:
        told = [event for event in view.events if event.kind in kinds]
        if told:
            yield Lane(name, marks=[Mark(event.time - view.started, _words(event), kind=style) for event in told])


def _words(event: Event) -> str:
    return f"{event.what} ({event.why})" if event.why else event.what


def event_rows(view: RunView) -> tuple[list[tuple[str, ...]], int]:
    """(after, kind, what, why) of everything that happened but phases and progress; of very many the first and the
    last, and how many are left out."""
    told = [event for event in view.events if event.kind not in _NOT_LISTED]
    left_out = max(0, len(told) - _MOST_EVENTS)
    kept = told if not left_out else [*told[: _MOST_EVENTS // 4], *told[-3 * _MOST_EVENTS // 4 :]]
    rows = [
        (draw.duration(event.time - view.started), event.kind, event.what, event.why or event.note) for event in kept
    ]
    return rows, left_out

"""The figures of a run's page: curves over its steps, and what happened on the axis of time. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.page.stacked import LANE_NAMES, Band, Lane, stacked_chart, time_chart
from appliance.page.svg import Bound, Chart, ChartMark, Series, Thinned, line_chart
from appliance.record.events import REWARD, VALIDATION, Event
from appliance.report import draw
from appliance.report.folder import DOING, PARTS, RunView
from appliance.terms.schemes import Scheme

GIB = 1 << 30
_PARTS = dict(zip(PARTS, (0, 5, 2, 4, 7), strict=True))  # their colours
_WIDTH = 1180
_COLOURS = dict(zip(DOING, (7, 5, 2, 3, 4), strict=True))
_LANES = (  # name, class of the frame's style, kinds of events
    ("checkpoints", "fine", ("checkpoint",)),
    ("guard", "warn", ("guard",)),
    ("notes", "open", ("note", "reward", "cluster", "clipping", "calibrated", "profile")),
    ("faults, stops", "bad", ("failure", "stall", "sweep", "stop", "restart")),
)


def curves(view: RunView) -> list[tuple[str, list[str]]]:
    """Draw the curves of a run, by heading."""
    return [
        ("What the run learned", _learned(view)),
        ("How far the rollout policy is from the trainer's", [*_mismatch(view), *_quantised(view)]),
        ("What a step takes", _spent(view)),
    ]


def _learned(view: RunView) -> list[str]:
    marks, validated = _attempt_marks(view), view.steps.validated
    schemes = sorted(validated, key=str(Scheme.BF16).__eq__)  # BF16 last
    validation = [_known(validated[each], name=each, index=index) for index, each in enumerate(schemes)]
    how = view.state.val_how if view.plan.task.val_sets else "greedy, unseen problems"
    clipped = "of the tokens with a negative advantage; where this rises with the entropy, clipping removes noise"
    cut = "share of the samples, cut before the model ended them"
    rewards = Chart("Rewards", "mean of each in a step", marks=marks, legend=True)
    averages = Chart("Validations", "mean reward", marks=marks, legend=True)
    passed = Chart("Passed", "at least one of several tries", marks=marks, legend=True)
    return [
        _curve(view, Chart("Reward", "sampled, mean of a step", marks=marks), "reward_mean"),
        *_by_name(view, rewards, _named_rewards(view), dotted=False),
        line_chart(Chart("Validation", how, marks=marks, legend=True), validation),
        *_by_name(view, averages, _named_sets(view, "avg@"), dotted=True),
        *_by_name(view, passed, _named_sets(view, "pass@"), dotted=True),
        _curve(view, Chart("Response", "tokens, mean", marks=marks, from_zero=True), "response_tokens_mean"),
        _curve(view, Chart("Unfinished", cut, marks=marks, from_zero=True), "unfinished_fraction"),
        _curve(view, Chart("Entropy", "nats per token", marks=marks), "entropy"),
        _curve(view, Chart("Clipped share", clipped, marks=marks, from_zero=True), "clipped_negative_fraction"),
        _curve(view, Chart("Gradient norm", "before clipping", marks=marks, from_zero=True), "grad_norm"),
        *_called(view),
    ]


def _called(view: RunView) -> list[str]:
    """Draw the tool calls of a task with tools."""
    if view.steps.curves["turns_mean"].last is None:
        return []
    marks = _attempt_marks(view)
    chart = Chart("Tool calls", "per sample, mean", marks=marks, from_zero=True, legend=True)
    calls = [_series(view, "tool_calls_mean", name="all", index=1), _series(view, "calls_right", name="right")]
    return [
        line_chart(chart, calls),
        _curve(view, Chart("Turns", "of the model per sample, mean", marks=marks), "turns_mean"),
    ]


def _named_rewards(view: RunView) -> dict[str, str]:
    """Key in StepHistory.known -> name of the curve, of each reward of a task of the user's own."""
    return {key: key.removeprefix(REWARD) for key in view.steps.known if key.startswith(REWARD)}


def _named_sets(view: RunView, start: str) -> dict[str, str]:
    """Key in StepHistory.known -> name of the curve, for `<set> avg@<n>` or `<set> pass@<k>`. start: beginning of the
    metric's name."""
    keys = [key for key in view.steps.known if key.startswith(VALIDATION)]
    split = {key: key.removeprefix(VALIDATION).rpartition("/") for key in keys}
    return {key: f"{name} {metric}" for key, (name, _, metric) in split.items() if metric.startswith(start)}


def _by_name(view: RunView, chart: Chart, names: dict[str, str], *, dotted: bool) -> list[str]:
    """Draw a curve for each name; no figure where there is none. dotted: whether few lines of metrics have the
    values."""
    curves = [
        _known(view.steps.known[key], name=name, index=index, dotted=dotted)
        for index, (key, name) in enumerate(names.items())
    ]
    return [line_chart(chart, curves)] if curves else []


def _mismatch(view: RunView) -> list[str]:
    marks = [*_attempt_marks(view), *_guard_marks(view)]
    bounds = view.plan.mismatch_bounds
    (_, most_k3), (least_ess, _), (low, high) = bounds.k3_kl.bad, bounds.ess.bad, bounds.weight_mean.bad
    of_k3, of_ess = [Bound(most_k3, f"bound {most_k3:g}")], [Bound(least_ess, f"bound {least_ess:g}")]
    of_weights = [Bound(low, f"mean above {low:g}"), Bound(high, f"mean below {high:g}")]
    k3 = Chart("Mismatch, k3", "nats per token, logarithmic", logarithmic=True, bounds=of_k3, marks=marks)
    before = "before truncation, logarithmic"
    weights = Chart("Importance weights", before, logarithmic=True, bounds=of_weights, marks=marks, legend=True)
    both = [_series(view, "is_weight_mean", name="mean"), _series(view, "is_weight_max", name="largest", index=1)]
    acted = Chart("Truncated", "share of the tokens that the correction acted on", marks=marks, from_zero=True)
    return [
        _curve(view, k3, "mismatch_k3_kl"),
        *_distributions(view, marks=marks),
        _curve(view, Chart("Effective sample size", "share", bounds=of_ess, marks=marks), "is_ess"),
        line_chart(weights, both),
        _curve(view, acted, "is_truncated_fraction"),
    ]


def _distributions(view: RunView, *, marks: list[ChartMark]) -> list[str]:
    """Draw the distributions of a run whose engines report their most likely words."""
    charts = (
        ("Divergence of distributions", "nats per token, over the most likely words", "mismatch_top_kl"),
        ("Score centering", "sum of |mean score| by the logits, mean of a token", "score_centering"),
    )
    return [
        _curve(view, Chart(title, unit, marks=marks, from_zero=True), number)
        for title, unit, number in charts
        if view.steps.curves[number].last is not None
    ]


def _quantised(view: RunView) -> list[str]:
    """Draw what weight updates did to the codes; nothing for a run whose rollouts are in BF16 throughout."""
    if view.steps.curves["codes_changed_fraction"].last is None:
        return []
    marks = [*_attempt_marks(view), *_guard_marks(view)]
    shown = (
        ("Codes changed", "share, by an update", "codes_changed_fraction"),
        ("Saturated codes", "share, at the largest value", "saturated_fraction"),
        ("Scale drift", "mean |log(scale / first scale)|", "scale_drift"),
        ("Quantisation error", "relative, of the worst layer", "layer_error_max"),
    )
    return [_curve(view, Chart(title, unit, marks=marks, from_zero=True), number) for title, unit, number in shown]


def _spent(view: RunView) -> list[str]:
    marks = _attempt_marks(view)
    parts = {name: thinned.points() for name, thinned in view.steps.parts.items()}
    there = [name for name, points in parts.items() if any(high > 0 for _, _, _, high in points)]
    columns = [parts[name] for name in there]
    rows = [(each[0][0], [mean for _, mean, _, _ in each]) for each in zip(*columns, strict=True)]
    speed = Chart("Rollout speed", "tokens per second", marks=marks, from_zero=True)
    split = Chart("Time of a step", "s", marks=marks, legend=True)
    return [
        _curve(view, speed, "rollout_tokens_per_s"),
        stacked_chart(split, there, rows, colours=[_PARTS[name] for name in there]),
    ]


def _attempt_marks(view: RunView) -> list[ChartMark]:
    """Mark where a later attempt resumed: between the last step done before it and its own first step."""
    return [
        ChartMark(attempt.after + 0.5, f"attempt {attempt.number} resumes after step {attempt.after}")
        for attempt in view.attempts[1:]
    ]


def _guard_marks(view: RunView) -> list[ChartMark]:
    told = [event for event in view.events.of_kinds(["guard"]) if event.step is not None]
    return [ChartMark(float(event.step or 0), event.what, kind="mark warn") for event in told]


def _curve(view: RunView, chart: Chart, number: str) -> str:
    return line_chart(chart, [_series(view, number, name="value")])


def _series(view: RunView, number: str, *, name: str, index: int = 0) -> Series:
    """Return a curve, which breaks where a step has no value. number: of StepHistory.curves."""
    found = view.steps.curves[number]
    return Series(name, found.points(), index, newest=found.last)


def _known(found: Thinned, *, name: str, index: int, dotted: bool = True) -> Series:
    """Return the curve of a metric that most lines do not have: it is drawn across the others."""
    return Series(name, found.points(), index, dotted=dotted, newest=found.last)


def timeline(view: RunView) -> list[str]:
    """Draw the figures over time, in seconds since the first event; none before there is one."""
    if not view.events:
        return []
    seconds = max(view.ended - view.started, 1.0)
    marks = [ChartMark(attempt.time - view.started, f"attempt {attempt.number}") for attempt in view.attempts[1:]]
    doing = list(bands(view))
    there = {band.name for band in doing}
    colours = [(colour, name) for name, colour in _COLOURS.items() if name in there]
    attempts = f"{len(view.attempts)} attempts; dashed lines mark their starts" if marks else ""
    chart = Chart("What the run was doing", attempts, marks=marks, width=_WIDTH)
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
    found = view.memory.curve
    points = [(x - view.started, mean / GIB, low / GIB, high / GIB) for x, mean, low, high in found.points()]
    newest = None if found.last is None else found.last / GIB
    return [
        time_chart(chart, [Lane("doing", bands=doing), *_event_lanes(view)], seconds=seconds, colours=colours),
        line_chart(memory, [Series("memory, GiB", points, 0, newest=newest)]),
    ]


def bands(view: RunView) -> Iterator[Band]:
    """Yield the bands of the run's activities (`EventHistory.doing`), in seconds since its first event."""
    for band in view.events.doing(ended=view.ended):
        yield Band(band.start - view.started, band.end - view.started, band.name, _COLOURS[band.name])


def _event_lanes(view: RunView) -> Iterator[Lane]:
    for name, style, kinds in _LANES:
        told = view.events.of_kinds(kinds)
        if told:
            yield Lane(name, marks=[ChartMark(event.time - view.started, _words(event), kind=style) for event in told])


def _words(event: Event) -> str:
    return f"{event.what} ({event.why})" if event.why else event.what


def event_rows(view: RunView) -> tuple[list[tuple[str, ...]], int]:
    """Return rows (after, kind, what, why) of the listed events, and how many events are left out
    (EventHistory.listed)."""
    kept, left_out = view.events.listed()
    rows = [
        (draw.duration(event.time - view.started), event.kind, event.what, event.why or event.note) for event in kept
    ]
    return rows, left_out

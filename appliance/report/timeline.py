"""A run on the axis of time: what it was doing, what happened, how much memory it took. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from appliance.page.stacked import LANE_NAMES, Band, Lane, time_chart
from appliance.page.svg import Chart, Mark, Series, line_chart, thinned
from appliance.record.events import Event
from appliance.report import draw
from appliance.report.folder import RunView

WIDTH = 1180
_GIB = 1 << 30
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


def timeline(view: RunView) -> list[str]:
    """Figures with one axis of time, seconds since the first event. Empty before that."""
    if not view.events:
        return []
    seconds = max(view.ended - view.started, 1.0)
    marks = [Mark(attempt.time - view.started, f"attempt {attempt.number}") for attempt in view.attempts[1:]]
    doing = list(bands(view))
    lanes = [Lane("doing", bands=doing), *_event_lanes(view)]
    there = dict.fromkeys(band.name for band in doing)
    colours = [(colour, name) for name, colour in _COLOURS.items() if name in there]
    attempts = f"{len(view.attempts)} attempts; dashed lines are their starts" if marks else ""
    chart = Chart("What it was doing", attempts, marks=marks, width=WIDTH)
    return [time_chart(chart, lanes, seconds=seconds, colours=colours), *_memory(view, seconds=seconds, marks=marks)]


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


def _memory(view: RunView, *, seconds: float, marks: list[Mark]) -> list[str]:
    points = [(sample.time - view.started, sample.pss_bytes / _GIB) for sample in view.memory]
    chart = Chart(
        "Memory",
        "GiB, proportional set size of all processes on the launcher's host",
        over_time=True,
        x_range=(0.0, seconds),
        from_zero=True,
        marks=marks,
        width=WIDTH,
        height=180,
        left=LANE_NAMES,
    )
    return [line_chart(chart, [Series("memory, GiB", thinned(points), 0)])]


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

"""Charts of parts: areas that lie on one another, and bands and marks on an axis of time. Pure."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from appliance.page.svg import (
    BOTTOM,
    NUM_COLOURS,
    TOP,
    Axis,
    Chart,
    ChartMark,
    empty_chart,
    figure,
    frame,
    hover_data,
    vertical_mark,
    x_axis,
    x_ticks,
)

_LANE = 20
LANE_NAMES = 92  # room for the lanes' names
_NARROWEST = 0.7  # of a band, in units of the drawing: below it belongs to its neighbour


def stacked_chart(
    chart: Chart, names: Sequence[str], rows: Sequence[tuple[float, Sequence[float]]], *, colours: Sequence[int]
) -> str:
    """Draw areas that lie on one another. rows: (x, a part for each name, >= 0), x ascending. The parts of a row lie on
    one another."""
    if not rows:
        return empty_chart(chart)
    rows = [*rows, (rows[0][0] + 1, rows[0][1])] if len(rows) == 1 else rows
    horizontal = x_axis(chart, [x for x, _ in rows])
    vertical = Axis(0.0, max(max(sum(parts) for _, parts in rows) * 1.05, 1e-9), chart.height - BOTTOM, TOP)
    parts = [*frame(chart, horizontal, vertical)]
    below = [0.0] * len(rows)
    for place, name in enumerate(names):
        above = [low + each[place] for low, (_, each) in zip(below, rows, strict=True)]
        edge = [(x, top) for (x, _), top in zip(rows, above, strict=True)]
        back = [(x, low) for (x, _), low in zip(rows, below, strict=True)]
        spots = " ".join(f"{horizontal.at(x):.1f},{vertical.at(y):.1f}" for x, y in [*edge, *reversed(back)])
        fill = f"fill:var(--c{colours[place] % NUM_COLOURS})"
        title = f"<title>{html.escape(name)}</title>"
        parts.append(f'<polygon class="part" points="{spots}" style="{fill}">{title}</polygon>')
        below = above
    columns = [(name, colours[place], {x: each[place] for x, each in rows}) for place, name in enumerate(names)]
    hover = hover_data(chart, horizontal, xs=[x for x, _ in rows], columns=columns)
    legend = [(colours[place], name, rows[-1][1][place]) for place, name in enumerate(names)] if chart.legend else []
    return figure(chart, parts, legend=legend, hover=hover, solid=True)


@dataclass(frozen=True)
class Band:
    """One activity from one time to another, s."""

    start: float
    end: float
    name: str
    colour: int


@dataclass(frozen=True)
class Lane:
    """One line of a time chart: bands, or marks with the class of the frame's style that colours them."""

    name: str
    bands: Sequence[Band] = ()
    marks: Sequence[ChartMark] = ()


def time_chart(chart: Chart, lanes: Sequence[Lane], *, seconds: float, colours: Sequence[tuple[int, str]]) -> str:
    """Draw lanes over a common axis of time. chart.marks go through all of them.  colours: of the legend."""
    height = TOP + _LANE * len(lanes) + BOTTOM - 8
    shown = replace(chart, over_time=True, height=height)
    axis = Axis(0.0, max(seconds, 1.0), LANE_NAMES, chart.width - 10)
    bottom = TOP + _LANE * len(lanes)
    parts = [*x_ticks(shown, axis, y=bottom)]
    for place, lane in enumerate(lanes):
        top = TOP + _LANE * place
        parts.append(f'<text x="{LANE_NAMES - 8}" y="{top + 13}" text-anchor="end">{html.escape(lane.name)}</text>')
        parts.append(f'<line class="grid" x1="{LANE_NAMES}" x2="{axis.end}" y1="{top + _LANE}" y2="{top + _LANE}"/>')
        parts += _bands(lane.bands, axis, top=top)
        parts += [_spot(mark, axis, y=top + _LANE / 2) for mark in lane.marks]
    parts += [vertical_mark(mark, axis, top=TOP, bottom=bottom) for mark in chart.marks]
    legend = [(index, name, None) for index, name in colours]
    return figure(shown, parts, legend=legend, solid=True)


def _bands(bands: Sequence[Band], axis: Axis, *, top: float) -> Iterator[str]:
    for band in merge_bands(bands, least=_NARROWEST * (axis.high - axis.low) / (axis.end - axis.start)):
        x, width = axis.at(band.start), axis.at(band.end) - axis.at(band.start)
        box = f'x="{x:.1f}" y="{top + 2}" width="{max(width, 0.5):.1f}" height="{_LANE - 5}"'
        title = f"<title>{html.escape(band.name)}</title>"
        yield f'<rect class="band" {box} style="fill:var(--c{band.colour % NUM_COLOURS})">{title}</rect>'


def merge_bands(bands: Sequence[Band], *, least: float) -> list[Band]:
    """Merge neighbours of one kind; then merge each band shorter than `least` seconds with what follows, as the
    activity that took most of that time."""
    groups: list[list[Band]] = []
    for band in _joined(bands, gap=least):
        is_near = groups and band.start <= groups[-1][-1].end + least
        if is_near and groups[-1][-1].end - groups[-1][0].start < least:
            groups[-1].append(band)
        else:
            groups.append([band])
    return _joined(map(_as_longest, groups), gap=least)


def _joined(bands: Iterable[Band], *, gap: float) -> list[Band]:
    """gap: between neighbours of one kind, s at most."""
    joined: list[Band] = []
    for band in bands:
        if joined and band.name == joined[-1].name and band.start <= joined[-1].end + gap:
            joined[-1] = replace(joined[-1], end=band.end)
        else:
            joined.append(band)
    return joined


def _as_longest(bands: Sequence[Band]) -> Band:
    seconds: Counter[str] = Counter()
    for band in bands:
        seconds[band.name] += band.end - band.start
    longest = max(bands, key=lambda band: seconds[band.name])
    return replace(longest, start=bands[0].start, end=bands[-1].end)


def _spot(mark: ChartMark, axis: Axis, *, y: float) -> str:
    title = f"<title>{html.escape(mark.label)}</title>"
    return f'<circle class="spot {mark.kind}" cx="{axis.at(mark.x):.1f}" cy="{y}" r="4.5">{title}</circle>'

"""Charts as inline SVG: curves with a band, and intervals beside a margin. Pure; no font, no network.

A chart is complete as it is. `data-hover` holds its numbers for the page's script, which shows them under the pointer.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from appliance.page.axis import SMALLEST, Axis, number_label, padded, ticks, time_label, time_ticks, whole_ticks

NUM_COLOURS = 8  # of the frame's style; the dashes say the same without colour
DASHES = ("", "6 3", "2 3", "8 3 2 3", "12 4", "1 2", "4 6", "10 2 2 2")
WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 8, 30
_DIGITS = 5  # of a number under the pointer
MOST = 360  # points of one curve: about one a pixel of a chart

Point = tuple[float, float, float, float]


@dataclass(frozen=True)
class Series:
    """points: (x, mean, low, high), x ascending; where the mean is NaN the line breaks.

    dotted: a dot on every point, for few of them.  index: of its colour.
    """

    name: str
    points: Sequence[Point]
    index: int
    dotted: bool = False

    @property
    def last(self) -> float | None:
        return next((mean for _, mean, _, _ in reversed(self.points) if not math.isnan(mean)), None)


@dataclass(frozen=True)
class Bound:
    """A level that the curves are judged by."""

    value: float
    label: str


@dataclass(frozen=True)
class Mark:
    """Something that happened at x. kind: a class of the frame's style."""

    x: float
    label: str
    kind: str = "mark"


@dataclass(frozen=True)
class Chart:
    """What belongs to a chart besides its curves.

    unit: of the vertical axis.  legend: with each curve's last value.  over_time: x is seconds, not steps.
    x_range: None for that of the curves.  from_zero: the vertical axis begins at 0.  left: room for its labels.
    """

    title: str
    unit: str = ""
    logarithmic: bool = False
    bounds: Sequence[Bound] = ()
    marks: Sequence[Mark] = ()
    legend: bool = False
    over_time: bool = False
    x_range: tuple[float, float] | None = None
    from_zero: bool = False
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    note: str = ""


def line_chart(chart: Chart, series: Sequence[Series]) -> str:
    """A figure, or a sentence where there is nothing to draw."""
    kept = [_positive(each) if chart.logarithmic else each for each in series]
    kept = [each for each in kept if each.last is not None]
    if not kept:
        return nothing(chart)
    horizontal, vertical = x_axis(chart, [point[0] for each in kept for point in each.points]), _y_axis(chart, kept)
    parts = [*frame(chart, horizontal, vertical)]
    for each in kept:
        parts += _curve(each, horizontal, vertical)
    legend = [(each.index, each.name, each.last) for each in kept] if chart.legend else []
    newest = kept[0].last if len(series) == 1 else None
    hover = hover_data(
        chart, horizontal, xs=_all_x(kept), columns=[(each.name, each.index, _by_x(each)) for each in kept]
    )
    return figure(chart, parts, legend=legend, hover=hover, newest=newest)


def nothing(chart: Chart) -> str:
    return f'<figure class="empty"><figcaption>{_caption(chart, [])}</figcaption><p>nothing to show yet</p></figure>'


def x_axis(chart: Chart, xs: Sequence[float]) -> Axis:
    """At least 1 wide, and where floats lie further apart than that, some of them."""
    first, last = chart.x_range or (min(xs), max(xs))
    return Axis(first, max(last, first + max(1.0, 8 * math.ulp(first))), chart.left, chart.width - RIGHT)


def _y_axis(chart: Chart, series: Sequence[Series]) -> Axis:
    values = [value for each in series for point in each.points for value in point[1:] if not math.isnan(value)]
    values += [bound.value for bound in chart.bounds]
    if chart.from_zero:
        values.append(0.0)
    scale = math.log10 if chart.logarithmic else float
    low, high = padded(scale(max(min(values), SMALLEST)) if chart.logarithmic else min(values), scale(max(values)))
    low = 0.0 if chart.from_zero and min(values) >= 0 else low
    return Axis(low, high, chart.height - BOTTOM, TOP, chart.logarithmic)


def frame(chart: Chart, horizontal: Axis, vertical: Axis) -> Iterator[str]:
    """Grid, ticks, bounds and marks: everything but the curves."""
    left, right, bottom = horizontal.start, horizontal.end, vertical.start
    for tick in vertical.ticks():
        y = vertical.at(tick)
        yield f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{number_label(tick)}</text>'
    yield from x_ticks(chart, horizontal, y=bottom)
    for bound in chart.bounds:
        y = vertical.at(bound.value)
        over = y + 11 if y < TOP + 12 else y - 4
        yield f'<line class="bound" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        label = html.escape(bound.label)
        yield f'<text class="bound" x="{right - 3}" y="{over:.1f}" text-anchor="end">{label}</text>'
    for mark in chart.marks:
        yield vertical_mark(mark, horizontal, top=vertical.end, bottom=bottom)


def x_ticks(chart: Chart, horizontal: Axis, *, y: float) -> Iterator[str]:
    """The labels below a horizontal axis at height y."""
    for tick in time_ticks(horizontal.high) if chart.over_time else whole_ticks(horizontal.low, horizontal.high):
        text = time_label(tick) if chart.over_time else number_label(tick)
        x = horizontal.at(tick)
        anchor = "end" if x > horizontal.end - 12 else "middle"
        yield f'<text x="{x:.1f}" y="{y + 14:.1f}" text-anchor="{anchor}">{text}</text>'
    if not chart.over_time:
        yield f'<text x="{(horizontal.start + horizontal.end) / 2}" y="{y + 27:.1f}" text-anchor="middle">step</text>'


def vertical_mark(mark: Mark, horizontal: Axis, *, top: float, bottom: float) -> str:
    x = horizontal.at(mark.x)
    return (
        f'<line class="{mark.kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}">'
        f"<title>{html.escape(mark.label)}</title></line>"
    )


def _curve(series: Series, horizontal: Axis, vertical: Axis) -> Iterator[str]:
    colour, dash = f"var(--c{series.index % NUM_COLOURS})", DASHES[series.index % len(DASHES)]
    name = html.escape(series.name)
    for piece in _pieces(series.points):
        spots = [(horizontal.at(x), vertical.at(mean)) for x, mean, _, _ in piece]
        if any(low != high for _, _, low, high in piece):
            there = [f"{horizontal.at(x):.1f},{vertical.at(high):.1f}" for x, _, _, high in piece]
            back = [f"{horizontal.at(x):.1f},{vertical.at(low):.1f}" for x, _, low, _ in reversed(piece)]
            yield f'<polygon points="{" ".join(there + back)}" style="fill:{colour}" opacity="0.18"/>'
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        if len(piece) > 1:
            yield (
                f'<polyline class="curve" points="{line}" style="stroke:{colour}" stroke-dasharray="{dash}">'
                f"<title>{name}</title></polyline>"
            )
        if series.dotted or len(piece) == 1:
            yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill:{colour}"/>' for x, y in spots)


def _pieces(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Runs of points that have a value."""
    piece: list[Point] = []
    for point in points:
        if math.isnan(point[1]):
            if piece:
                yield piece
            piece = []
        else:
            piece.append(point)
    if piece:
        yield piece


def interval_chart(title: str, rows: Sequence[tuple[str, float, float, float, int]], *, margin: float) -> str:
    """rows: (name, mean, low, high, index of the colour), a line each; the margin is a band around 0."""
    height = TOP + 24 * len(rows) + BOTTOM
    chart = Chart(title, height=height)
    if not rows:
        return nothing(chart)
    low, high = padded(min(-margin, *(row[2] for row in rows)), max(margin, *(row[3] for row in rows)))
    axis = Axis(low, high, 150, WIDTH - RIGHT)
    bottom = height - BOTTOM
    parts = [
        f'<rect class="margin" x="{axis.at(-margin):.1f}" width="{axis.at(margin) - axis.at(-margin):.1f}" y="{TOP}" '
        f'height="{bottom - TOP}"/>',
        f'<line class="grid" x1="{axis.at(0):.1f}" x2="{axis.at(0):.1f}" y1="{TOP}" y2="{bottom}"/>',
    ]
    for tick in ticks(low, high):
        parts.append(
            f'<text x="{axis.at(tick):.1f}" y="{height - 14}" text-anchor="middle">{number_label(tick)}</text>'
        )
    for place, (name, mean, below, above, index) in enumerate(rows):
        y, colour = TOP + 24 * place + 12, f"var(--c{index % NUM_COLOURS})"
        parts.append(f'<text x="142" y="{y + 4}" text-anchor="end">{html.escape(name)}</text>')
        ends = f'x1="{axis.at(below):.1f}" x2="{axis.at(above):.1f}" y1="{y}" y2="{y}"'
        parts.append(f'<line {ends} style="stroke:{colour}" stroke-width="2"/>')
        parts.append(f'<circle cx="{axis.at(mean):.1f}" cy="{y}" r="4" style="fill:{colour}"/>')
    return figure(chart, parts, legend=[], hover="")


def swatch(index: int, *, solid: bool = False) -> str:
    """A short piece of a series' line, or a spot of an area's colour, for a legend."""
    if solid:
        return f'<i class="spot" style="background:var(--c{index % NUM_COLOURS})"></i>'
    return (
        f'<svg class="swatch" width="26" height="10" aria-hidden="true"><line x1="0" x2="26" y1="5" y2="5" '
        f'style="stroke:var(--c{index % NUM_COLOURS})" stroke-width="2.5" '
        f'stroke-dasharray="{DASHES[index % len(DASHES)]}"/></svg>'
    )


def hover_data(
    chart: Chart, horizontal: Axis, *, xs: Sequence[float], columns: Sequence[tuple[str, int, dict[float, float]]]
) -> str:
    """JSON for the script. columns: (name, index of the colour, value by x)."""
    values = {
        "range": [horizontal.low, horizontal.high],
        "places": [horizontal.start, horizontal.end],
        "time": chart.over_time,
        "xs": [round(x, 3) for x in xs],
        "columns": [
            {"name": name, "colour": index % NUM_COLOURS, "ys": [_short(by_x.get(x)) for x in xs]}
            for name, index, by_x in columns
        ],
    }
    return json.dumps(values, separators=(",", ":"))


def figure(
    chart: Chart,
    parts: Sequence[str],
    *,
    legend: Sequence[tuple[int, str, float | None]],
    hover: str,
    solid: bool = False,
    newest: float | None = None,
) -> str:
    """legend: (index of the colour, name, last value), none for no legend.  solid: areas, not lines.

    newest: the value that a single curve ends with."""
    box = f'viewBox="0 0 {chart.width} {chart.height}" role="img" aria-label="{html.escape(chart.title)}"'
    data = f' data-hover="{html.escape(hover)}"' if hover else ""
    caption = f"<figcaption>{_caption(chart, legend, solid=solid, newest=newest)}</figcaption>"
    return f'<figure>{caption}<svg class="chart" {box}{data}>{"".join(parts)}</svg></figure>'


def _caption(
    chart: Chart,
    legend: Sequence[tuple[int, str, float | None]],
    *,
    solid: bool = False,
    newest: float | None = None,
) -> str:
    unit = f' <span class="unit">{html.escape(chart.unit)}</span>' if chart.unit else ""
    note = f'<p class="note">{html.escape(chart.note)}</p>' if chart.note else ""
    names = "".join(
        f"<span>{swatch(index, solid=solid)} {html.escape(name)}{_newest(last)}</span>" for index, name, last in legend
    )
    names = f'<p class="legend">{names}</p>' if names else ""
    return (
        f'<span class="newest">{_newest(newest)}</span><strong>{html.escape(chart.title)}</strong>{unit}{names}{note}'
    )


def _newest(value: float | None) -> str:
    if value is None:
        return ""
    return f" <b>{number_label(value) if value == 0 or abs(value) >= 1e-3 else f'{value:.1e}'}</b>"


def _all_x(series: Sequence[Series]) -> list[float]:
    return sorted({point[0] for each in series for point in each.points})


def _by_x(series: Series) -> dict[float, float]:
    return {x: mean for x, mean, _, _ in series.points if not math.isnan(mean)}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")


def _positive(series: Series) -> Series:
    """What a logarithmic axis can show: zeros are left out."""
    kept = [(x, mean, max(low, SMALLEST), high) for x, mean, low, high in series.points if not mean <= SMALLEST]
    return Series(series.name, kept, series.index, dotted=series.dotted)


def thinned(points: Sequence[tuple[float, float | None]], *, most: int = MOST) -> list[Point]:
    """(x, mean, smallest, largest) of (x, value) pairs, x ascending; runs of points are put together above `most`.

    A value that is None becomes NaN, where a curve breaks; within a run it is left out.
    """
    size = max(1, math.ceil(len(points) / most))
    return [_together(points[start : start + size]) for start in range(0, len(points), size)]


def _together(run: Sequence[tuple[float, float | None]]) -> Point:
    values = [value for _, value in run if value is not None]
    x = run[len(run) // 2][0]
    if not values:
        return x, math.nan, math.nan, math.nan
    return x, sum(values) / len(values), min(values), max(values)

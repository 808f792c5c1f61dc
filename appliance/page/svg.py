"""Charts as inline SVG: curves with a band, and intervals beside a margin. Pure; no font, no network. A chart is
complete as it is. `data-hover` has its numbers for the page's script, which shows them under the pointer."""

from __future__ import annotations

import html
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

NUM_COLOURS = 8  # of the frame's style; the dashes say the same without colour
DASHES = ("", "6 3", "2 3", "8 3 2 3", "12 4", "1 2", "4 6", "10 2 2 2")
WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 8, 30
_DIGITS = 5  # of a number under the pointer
SMALLEST = 1e-12  # below, a logarithmic axis shows nothing
_TIME_STEPS_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400)
MOST = 360  # points of one curve: about one a pixel of a chart

Point = tuple[float, float, float, float]


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]
    """Points (x, mean, low, high), x ascending; where the mean is NaN the line breaks."""
    index: int
    """Index of the colour."""
    dotted: bool = False
    """Whether every point has a dot, for curves of few points."""
    newest: float | None = None
    """Value that the curve ends with, where the last point is the mean of several."""

    @property
    def last(self) -> float | None:
        if self.newest is not None:
            return self.newest
        return next((mean for _, mean, _, _ in reversed(self.points) if not math.isnan(mean)), None)


@dataclass(frozen=True)
class Bound:
    """A level that the curves are judged by."""

    value: float
    label: str


@dataclass(frozen=True)
class ChartMark:
    """Something that happened at x."""

    x: float
    label: str
    kind: str = "mark"
    """Class of the frame's style."""


@dataclass(frozen=True)
class Chart:
    """Settings of a chart: everything besides its curves."""

    title: str
    unit: str = ""
    """Unit of the vertical axis."""
    logarithmic: bool = False
    bounds: Sequence[Bound] = ()
    marks: Sequence[ChartMark] = ()
    legend: bool = False
    """Whether the chart has a legend with each curve's last value."""
    over_time: bool = False
    """Whether x is seconds, not steps."""
    x_range: tuple[float, float] | None = None
    """Range of x; None: that of the curves."""
    from_zero: bool = False
    """Whether the vertical axis begins at 0."""
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    """Room for the labels on the left."""


def line_chart(chart: Chart, series: Sequence[Series]) -> str:
    """Draw curves as a figure; a sentence where there is nothing to draw."""
    drawn = [_positive(curve) if chart.logarithmic else curve for curve in series]
    drawn = [curve for curve in drawn if curve.last is not None]
    if not drawn:
        return empty_chart(chart)
    horizontal, vertical = x_axis(chart, [point[0] for curve in drawn for point in curve.points]), _y_axis(chart, drawn)
    parts = [*frame(chart, horizontal, vertical)]
    for curve in drawn:
        parts += _curve(curve, horizontal, vertical)
    legend = [(curve.index, curve.name, curve.last) for curve in drawn] if chart.legend else []
    xs = sorted({point[0] for curve in drawn for point in curve.points})
    by_x = [{x: mean for x, mean, _, _ in curve.points if not math.isnan(mean)} for curve in drawn]
    columns = [(curve.name, curve.index, values) for curve, values in zip(drawn, by_x, strict=True)]
    hover = hover_data(chart, horizontal, xs=xs, columns=columns)
    return figure(chart, parts, legend=legend, hover=hover, newest=drawn[0].last if len(series) == 1 else None)


def empty_chart(chart: Chart) -> str:
    return f'<figure class="empty">{_caption(chart)}<p>nothing to show yet</p></figure>'


def x_axis(chart: Chart, xs: Sequence[float]) -> Axis:
    """Make an axis at least 1 wide, and where floats lie further apart than that, some of them."""
    first, last = chart.x_range or (min(xs), max(xs))
    return Axis(first, max(last, first + max(1.0, 8 * math.ulp(first))), chart.left, chart.width - RIGHT)


def _y_axis(chart: Chart, series: Sequence[Series]) -> Axis:
    values = [value for each in series for point in each.points for value in point[1:] if not math.isnan(value)]
    values += [bound.value for bound in chart.bounds]
    if chart.from_zero:
        values.append(0.0)
    scale = math.log10 if chart.logarithmic else float
    low, high = pad_range(scale(max(min(values), SMALLEST)) if chart.logarithmic else min(values), scale(max(values)))
    low = 0.0 if chart.from_zero and min(values) >= 0 else low
    return Axis(low, high, chart.height - BOTTOM, TOP, chart.logarithmic)


def frame(chart: Chart, horizontal: Axis, vertical: Axis) -> Iterator[str]:
    """Draw grid, ticks, bounds and marks: everything but the curves."""
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
    """Draw the labels below a horizontal axis at height y."""
    for tick in time_ticks(horizontal.high) if chart.over_time else whole_ticks(horizontal.low, horizontal.high):
        text = time_label(tick) if chart.over_time else number_label(tick)
        x = horizontal.at(tick)
        anchor = "end" if x > horizontal.end - 12 else "middle"
        yield f'<text x="{x:.1f}" y="{y + 14:.1f}" text-anchor="{anchor}">{text}</text>'
    if not chart.over_time:
        yield f'<text x="{(horizontal.start + horizontal.end) / 2}" y="{y + 27:.1f}" text-anchor="middle">step</text>'


def vertical_mark(mark: ChartMark, horizontal: Axis, *, top: float, bottom: float) -> str:
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
    """Yield the runs of points that have a value."""
    for is_gap, run in itertools.groupby(points, key=lambda point: math.isnan(point[1])):
        if not is_gap:
            yield list(run)


def interval_chart(title: str, rows: Sequence[tuple[str, float, float, float, int]], *, margin: float) -> str:
    """Draw intervals. rows: (name, mean, low, high, index of the colour), a line each; the margin is a band around
    0."""
    height = TOP + 24 * len(rows) + BOTTOM
    chart = Chart(title, height=height)
    if not rows:
        return empty_chart(chart)
    low, high = pad_range(min(-margin, *(row[2] for row in rows)), max(margin, *(row[3] for row in rows)))
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
    return figure(chart, parts)


def swatch(index: int, *, solid: bool = False) -> str:
    """Draw a short piece of a series' line, or a spot of an area's colour, for a legend."""
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
    """Make the JSON for the script. columns: (name, index of the colour, value by x)."""
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
    legend: Sequence[tuple[int, str, float | None]] = (),
    hover: str = "",
    solid: bool = False,
    newest: float | None = None,
) -> str:
    """Put the parts of a chart into a figure. legend: (index of the colour, name, last value), none for no legend.
    solid: areas, not lines. newest: the value that a single curve ends with."""
    box = f'viewBox="0 0 {chart.width} {chart.height}" role="img" aria-label="{html.escape(chart.title)}"'
    data = f' data-hover="{html.escape(hover)}"' if hover else ""
    caption = _caption(chart, legend, solid=solid, newest=newest)
    return f'<figure>{caption}<svg class="chart" {box}{data}>{"".join(parts)}</svg></figure>'


def _caption(
    chart: Chart,
    legend: Sequence[tuple[int, str, float | None]] = (),
    *,
    solid: bool = False,
    newest: float | None = None,
) -> str:
    unit = f' <span class="unit">{html.escape(chart.unit)}</span>' if chart.unit else ""
    names = "".join(
        f"<span>{swatch(index, solid=solid)} {html.escape(name)}{_newest(last)}</span>" for index, name, last in legend
    )
    names = f'<p class="legend">{names}</p>' if names else ""
    title = f'<span class="newest">{_newest(newest)}</span><strong>{html.escape(chart.title)}</strong>{unit}'
    return f"<figcaption>{title}{names}</figcaption>"


def _newest(value: float | None) -> str:
    if value is None:
        return ""
    return f" <b>{number_label(value) if value == 0 or abs(value) >= 1e-3 else f'{value:.1e}'}</b>"


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")


def _positive(series: Series) -> Series:
    """Return what a logarithmic axis can show: zeros are left out."""
    kept = [(x, mean, max(low, SMALLEST), high) for x, mean, low, high in series.points if not mean <= SMALLEST]
    newest = series.newest if series.newest is not None and series.newest > SMALLEST else None
    return replace(series, points=kept, newest=newest)


class Thinned:
    """A curve as it comes, of a bounded number of points: above `most` of them, runs of 2, 4, 8 ... are put together,
    each at its last x, with its mean, its smallest and its largest value."""

    last: float | None
    """Newest value, exact; None before there is one."""

    def __init__(self, *, most: int = MOST) -> None:
        """most: number of points, even."""
        self.last = None
        self._most = most
        self._size = 1
        self._runs: list[_Run] = []

    def extend(self, xs: Sequence[float], values: Sequence[float | None]) -> None:
        """Append a value for each x; x ascending, and after those before. A value that is None is left out of its
        run."""
        at = 0
        while at < len(xs):
            if not self._runs or self._runs[-1].points == self._size:
                if len(self._runs) == self._most:
                    pairs = zip(self._runs[::2], self._runs[1::2], strict=True)
                    self._runs, self._size = [first.with_next(second) for first, second in pairs], 2 * self._size
                self._runs.append(_Run())
            end = min(len(xs), at + self._size - self._runs[-1].points)
            known = [value for value in values[at:end] if value is not None]
            of_values = (len(known), sum(known), min(known), max(known)) if known else ()
            self._runs[-1] = self._runs[-1].with_next(_Run(end - at, xs[end - 1], *of_values))
            self.last = known[-1] if known else self.last
            at = end

    def points(self) -> list[Point]:
        """Return the points. A run without a value has NaN, where a curve breaks."""
        return [
            (run.x, run.sum / run.values, run.low, run.high) if run.values else (run.x, math.nan, math.nan, math.nan)
            for run in self._runs
        ]


class _Run(NamedTuple):
    """A run of neighbouring points."""

    points: int = 0
    x: float = 0.0
    """Position of the last value."""
    values: int = 0
    """Number of values that are known."""
    sum: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def with_next(self, run: _Run) -> _Run:
        return _Run(
            self.points + run.points,
            run.x,
            self.values + run.values,
            self.sum + run.sum,
            min(self.low, run.low),
            max(self.high, run.high),
        )


def thinned(points: Sequence[Point], *, most: int) -> list[Point]:
    """Thin a whole curve of (x, mean, smallest, largest): above `most` points, runs of them are put together."""
    size = math.ceil(len(points) / most)
    merged = []
    for start in range(0, len(points), max(1, size)):
        xs, means, lows, highs = zip(*points[start : start + size], strict=True)
        merged.append((xs[-1], sum(means) / len(means), min(lows), max(highs)))
    return merged


@dataclass(frozen=True)
class Axis:
    low: float
    """Value at the start of the axis, below `high`; on a logarithmic axis its exponent."""
    high: float
    """Value at the end of the axis; on a logarithmic axis its exponent."""
    start: float
    """Place of the start, in units of the drawing."""
    end: float
    """Place of the end, in units of the drawing; before `start` where the axis points upwards."""
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Return the place of a value; what lies beyond an end is drawn at the end."""
        scaled = math.log10(max(value, SMALLEST)) if self.logarithmic else value
        share = (scaled - self.low) / (self.high - self.low)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.logarithmic else ticks(self.low, self.high)


def pad_range(low: float, high: float) -> tuple[float, float]:
    """Move both ends out a little, so that no curve lies on the frame and a constant has a place."""
    room = 0.05 * (high - low) or max(abs(high) * 0.1, 0.05)
    return low - room, high + room


def ticks(low: float, high: float) -> list[float]:
    """Choose three to six round values within the range."""
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    size = next(each * power for each in (1, 2, 5, 10) if each * power >= raw)
    count = math.floor(high / size) - math.ceil(low / size) + 1
    return [round((math.ceil(low / size) + each) * size, 12) for each in range(count)]


def whole_ticks(low: float, high: float) -> list[float]:
    """Choose ticks without fractions: of steps there are no halves."""
    return [each for each in ticks(low, high) if each == round(each)]


def log_ticks(low: float, high: float) -> list[float]:
    """Choose powers of ten, with 2 and 5 times them where there are few; low and high are exponents."""
    if high - low < 1.5:
        every_third = [
            10.0**power * times for power in range(math.floor(low), math.ceil(high) + 1) for times in (1, 2, 5)
        ]
        within = [round(each, 12) for each in every_third if low <= math.log10(each) <= high]
        return within or [10.0 ** ((low + high) / 2)]
    every = max(1, math.ceil((high - low) / 5))
    return [10.0**power for power in range(math.ceil(low), math.floor(high) + 1, every)]


def time_ticks(seconds: float) -> list[float]:
    """Choose round times from 0 to so many seconds, eight at most."""
    size = next((each for each in _TIME_STEPS_S if seconds / each <= 7), None)
    size = size or 86400 * math.ceil(seconds / 86400 / 7)
    return [float(size * each) for each in range(math.floor(seconds / size) + 1)]


def number_label(value: float) -> str:
    """Format a number for a label: `0.25`, `3e-5`, `12,000`."""
    if 0 < abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def time_label(seconds: float) -> str:
    """Format a time for a label, in its shortest exact form: `40 s`, `5 min`, `2 h`, `1 h 30 min`."""
    whole = round(seconds)
    if whole < 60 or whole % 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return " ".join([*([f"{hours} h"] if hours else []), *([f"{minutes} min"] if minutes or not hours else [])])

"""Charts as inline SVG: lines with a band, and intervals beside a margin. Pure; no script, no font, no network."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

# Okabe and Ito's colours, which colour-blind people can tell apart; the dashes say the same without colour.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#666666")
DASHES = ("", "6 3", "2 3", "8 3 2 3", "12 4", "1 2", "4 6", "10 2 2 2")
_WIDTH, _HEIGHT = 460, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 10, 26, 34
_SMALLEST = 1e-12  # below, a logarithmic axis shows nothing


@dataclass(frozen=True)
class Series:
    """points: (x, mean, low, high), x ascending."""

    name: str
    points: Sequence[tuple[float, float, float, float]]
    index: int


def line_chart(title: str, series: Sequence[Series], *, unit: str = "", logarithmic: bool = False) -> str:
    """A chart, or a sentence where there is nothing to draw. unit: of the vertical axis."""
    kept = [_positive(each) if logarithmic else each for each in series]
    kept = [each for each in kept if each.points]
    if not kept:
        return f"<figure><figcaption>{html.escape(title)}: nothing to show</figcaption></figure>"
    xs = [point[0] for each in kept for point in each.points]
    ys = [value for each in kept for point in each.points for value in point[1:]]
    scale = math.log10 if logarithmic else float
    low, high = _padded(scale(min(ys)), scale(max(ys)))
    first, last = min(xs), max(max(xs), min(xs) + 1)

    def x_at(x: float) -> float:
        return _LEFT + (x - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y_at(y: float) -> float:
        return _HEIGHT - _BOTTOM - (scale(y) - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_title(title + (f", {unit}" if unit else ""))]
    for tick in _log_ticks(low, high) if logarithmic else _ticks(low, high):
        y = y_at(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_label(tick)}</text>')
    for tick in _ticks(first, last):
        parts.append(f'<text x="{x_at(tick):.1f}" y="{_HEIGHT - 16}" text-anchor="middle">{_label(tick)}</text>')
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 2}" text-anchor="middle">step</text>')
    for each in kept:
        colour, dash = style(each.index)
        there = [f"{x_at(x):.1f},{y_at(high_):.1f}" for x, _, _, high_ in each.points]
        back = [f"{x_at(x):.1f},{y_at(low_):.1f}" for x, _, low_, _ in reversed(each.points)]
        parts.append(f'<polygon points="{" ".join(there + back)}" fill="{colour}" opacity="0.15"/>')
        line = " ".join(f"{x_at(x):.1f},{y_at(mean):.1f}" for x, mean, _, _ in each.points)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dash}">'
            f"<title>{html.escape(each.name)}</title></polyline>"
        )
    return _figure(parts, height=_HEIGHT, label=title)


def interval_chart(title: str, rows: Sequence[tuple[str, float, float, float, int]], *, margin: float) -> str:
    """rows: (name, mean, low, high, index of the colour), a line each; the margin is a band around 0."""
    if not rows:
        return f"<figure><figcaption>{html.escape(title)}: nothing to show</figcaption></figure>"
    height = _TOP + 24 * len(rows) + _BOTTOM
    low, high = _padded(min(-margin, *(row[2] for row in rows)), max(margin, *(row[3] for row in rows)))
    left = 150

    def x_at(x: float) -> float:
        return left + (x - low) / (high - low) * (_WIDTH - left - _RIGHT)

    bottom = height - _BOTTOM
    parts = [
        _title(title),
        f'<rect class="margin" x="{x_at(-margin):.1f}" width="{x_at(margin) - x_at(-margin):.1f}" y="{_TOP}" '
        f'height="{bottom - _TOP}"/>',
        f'<line class="grid" x1="{x_at(0):.1f}" x2="{x_at(0):.1f}" y1="{_TOP}" y2="{bottom}"/>',
    ]
    for tick in _ticks(low, high):
        parts.append(f'<text x="{x_at(tick):.1f}" y="{height - 18}" text-anchor="middle">{_label(tick)}</text>')
    for place, (name, mean, below, above, index) in enumerate(rows):
        y, (colour, _) = _TOP + 24 * place + 12, style(index)
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{html.escape(name)}</text>')
        ends = f'x1="{x_at(below):.1f}" x2="{x_at(above):.1f}" y1="{y}" y2="{y}"'
        parts.append(f'<line {ends} stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<circle cx="{x_at(mean):.1f}" cy="{y}" r="4" fill="{colour}"/>')
    return _figure(parts, height=height, label=title)


def swatch(index: int) -> str:
    """A short piece of a series' line, for a legend."""
    colour, dash = style(index)
    return (
        f'<svg class="swatch" width="34" height="10" aria-hidden="true"><line x1="0" x2="34" y1="5" y2="5" '
        f'stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash}"/></svg>'
    )


def style(index: int) -> tuple[str, str]:
    return COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)]


def _figure(parts: list[str], *, height: float, label: str) -> str:
    box = f'viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{html.escape(label)}"'
    return f"<figure><svg {box}>{''.join(parts)}</svg></figure>"


def _title(text: str) -> str:
    return f'<text class="title" x="{_LEFT}" y="15">{html.escape(text)}</text>'


def _positive(series: Series) -> Series:
    """What a logarithmic axis can show: zeros are left out."""
    kept = [(x, mean, max(low, _SMALLEST), high) for x, mean, low, high in series.points if mean > _SMALLEST]
    return Series(series.name, kept, series.index)


def _padded(low: float, high: float) -> tuple[float, float]:
    room = 0.05 * (high - low) or max(abs(high) * 0.1, 0.05)
    return low - room, high + room


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round values within the range."""
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    size = next(each * power for each in (1, 2, 5, 10) if each * power >= raw)
    count = math.floor(high / size) - math.ceil(low / size) + 1
    return [round((math.ceil(low / size) + each) * size, 12) for each in range(count)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten; low and high are exponents."""
    every = max(1, math.ceil((high - low) / 5))
    powers = range(math.ceil(low), math.floor(high) + 1, every)
    return [10.0**power for power in powers] or [10.0 ** ((low + high) / 2)]


def _label(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e") if 0 < abs(value) < 1e-3 else f"{value:.4g}"

"""An axis of a chart: from values to places, and where its ticks are. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

SMALLEST = 1e-12  # below, a logarithmic axis shows nothing
_TIME_STEPS_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400)


@dataclass(frozen=True)
class Axis:
    """low, high: the values at its ends, low < high; of a logarithmic axis their exponents.  start, end: places, in
    units of the drawing (end < start for one that points upwards)."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """The place of a value; what lies beyond an end is drawn at the end."""
        scaled = math.log10(max(value, SMALLEST)) if self.logarithmic else value
        share = (scaled - self.low) / (self.high - self.low)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.logarithmic else ticks(self.low, self.high)


def padded(low: float, high: float) -> tuple[float, float]:
    """Both ends moved out a little, so that no curve lies on the frame and a constant has a place."""
    room = 0.05 * (high - low) or max(abs(high) * 0.1, 0.05)
    return low - room, high + room


def ticks(low: float, high: float) -> list[float]:
    """Three to six round values within the range."""
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    size = next(each * power for each in (1, 2, 5, 10) if each * power >= raw)
    count = math.floor(high / size) - math.ceil(low / size) + 1
    return [round((math.ceil(low / size) + each) * size, 12) for each in range(count)]


def whole_ticks(low: float, high: float) -> list[float]:
    """The same without fractions: of steps there are no halves."""
    return [each for each in ticks(low, high) if each == round(each)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with 2 and 5 times them where there are few; low and high are exponents."""
    if high - low < 1.5:
        every_third = [
            10.0**power * times for power in range(math.floor(low), math.ceil(high) + 1) for times in (1, 2, 5)
        ]
        within = [round(each, 12) for each in every_third if low <= math.log10(each) <= high]
        return within or [10.0 ** ((low + high) / 2)]
    every = max(1, math.ceil((high - low) / 5))
    return [10.0**power for power in range(math.ceil(low), math.floor(high) + 1, every)]


def time_ticks(seconds: float) -> list[float]:
    """Round times from 0 to so many seconds, eight at most."""
    size = next((each for each in _TIME_STEPS_S if seconds / each <= 7), None)
    size = size or 86400 * math.ceil(seconds / 86400 / 7)
    return [float(size * each) for each in range(math.floor(seconds / size) + 1)]


def number_label(value: float) -> str:
    """`0.25`, `3e-5`, `12,000`."""
    if 0 < abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def time_label(seconds: float) -> str:
    """The shortest exact one: `40 s`, `5 min`, `2 h`, `1 h 30 min`."""
    whole = round(seconds)
    if whole < 60 or whole % 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return " ".join([*([f"{hours} h"] if hours else []), *([f"{minutes} min"] if minutes or not hours else [])])

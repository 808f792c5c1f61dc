"""Charts as text: what is drawn where, and what a curve does where it has no value."""

from __future__ import annotations

import html
import json
import math
import re

import pytest

from appliance.page.stacked import Band, merge_bands, stacked_chart
from appliance.page.svg import (
    Axis,
    Bound,
    Chart,
    Series,
    Thinned,
    line_chart,
    log_ticks,
    number_label,
    time_label,
    time_ticks,
    whole_ticks,
)


def points(*values: float | None) -> list[tuple[float, float, float, float]]:
    return curve(*values).points()


def curve(*values: float | None, most: int = 100) -> Thinned:
    """Steps from 1, each by itself."""
    thinned = Thinned(most=most)
    for step, value in enumerate(values, start=1):
        thinned.extend([float(step)], [value])
    return thinned


def hover_of(figure: str) -> dict:
    return json.loads(html.unescape(re.search(r'data-hover="([^"]*)"', figure)[1]))


def test_a_curve_breaks_where_a_value_is_missing_and_a_lone_value_is_a_dot() -> None:
    figure = line_chart(Chart("a"), [Series("value", points(1.0, 2.0, None, 3.0), 0)])
    assert figure.count("<polyline") == 1 and figure.count("<circle") == 1
    assert "nan" not in figure.lower()
    assert hover_of(figure)["columns"][0]["ys"] == [1.0, 2.0, None, 3.0]


def test_a_chart_without_a_value_says_so() -> None:
    for values in ((), (None, None)):
        assert "nothing to show yet" in line_chart(Chart("a"), [Series("value", points(*values), 0)])
    assert "nothing to show yet" in line_chart(Chart("a", logarithmic=True), [Series("value", points(0.0), 0)])


def test_a_bound_is_within_the_chart_and_named() -> None:
    figure = line_chart(Chart("a", bounds=[Bound(5.0, "bound <5>")]), [Series("value", points(1.0, 1.1), 0)])
    (y,) = re.findall(r'<line class="bound" [^>]*y1="([\d.]+)"', figure)
    ys = [float(pair.split(",")[1]) for pair in re.search(r'points="([^"]+)"', figure)[1].split()]
    assert 8 < float(y) < min(ys) and "bound &lt;5&gt;" in figure


def test_titles_and_names_are_escaped() -> None:
    figure = line_chart(Chart("<b>", "<i>", legend=True), [Series("</title><script>", points(1.0), 0)])
    assert "<b>" not in figure.replace(" <b>1</b>", "") and "<i>" not in figure and "<script>" not in figure


def test_many_points_become_means_with_their_range() -> None:
    few = [float(value % 7) for value in range(100)]
    assert points(*few) == [(float(step), value, value, value) for step, value in enumerate(few, start=1)]
    many = curve(*(float(step % 2) for step in range(1001)))  # runs of 16: 62 whole ones, and 9
    assert len(many.points()) == 63 and many.points()[0] == (16.0, 0.5, 0.0, 1.0)
    assert many.points()[-1] == (1001.0, 4 / 9, 0.0, 1.0) and many.last == 0.0
    at_once = Thinned(most=100)
    at_once.extend([float(step) for step in range(1, 1002)], [float(step % 2) for step in range(1001)])
    assert at_once.points() == many.points()
    assert math.isnan(points(None)[0][1])


def test_a_curve_of_means_ends_with_its_newest_value() -> None:
    """In the caption: that the last run of steps had another mean, nobody asks."""
    kept = curve(*(0.0 for _ in range(1000)), 3.0)
    assert "<b>3</b>" in line_chart(Chart("a"), [Series("value", kept.points(), 0, newest=kept.last)])


def test_parts_lie_on_one_another() -> None:
    figure = stacked_chart(Chart("a"), ["x", "y"], [(1.0, [1.0, 2.0]), (2.0, [1.0, 2.0])], colours=[0, 1])
    lower, upper = [
        re.findall(r"[\d.]+,([\d.]+)", each) for each in re.findall(r'class="part" points="([^"]+)"', figure)
    ]
    assert lower[:2] == upper[-2:]  # the upper edge of one is the lower edge of the next
    assert "polygon" in stacked_chart(Chart("a"), ["x"], [(1.0, [1.0])], colours=[0])  # one step is drawn, too


def test_short_bands_belong_to_their_neighbour_and_gaps_stay() -> None:
    bands = [Band(0, 10, "a", 0), Band(10, 10.1, "b", 1), Band(10.1, 20, "a", 0), Band(50, 60, "a", 0)]
    assert merge_bands(bands, least=1.0) == [Band(0, 20, "a", 0), Band(50, 60, "a", 0)]
    many_short = [Band(0, 5, "a", 0), *(Band(5 + each / 2, 5.5 + each / 2, "b", 1) for each in range(20))]
    assert merge_bands(many_short, least=1.0) == [Band(0, 5, "a", 0), Band(5, 15, "b", 1)]  # together they are long
    in_turn = [
        Band(at, at + width, name, 0)
        for each in range(9)
        for at, width, name in ((each, 0.2, "b"), (each + 0.2, 0.8, "a"))
    ]
    assert merge_bands(in_turn, least=2.0) == [Band(0, 9, "a", 0)]  # though "b" is the first


def test_ticks_are_round_and_few() -> None:
    assert whole_ticks(1, 3) == [1, 2, 3] and whole_ticks(0, 30) == [0, 10, 20, 30]
    assert log_ticks(-5, -1) == [1e-5, 1e-4, 1e-3, 1e-2, 1e-1]
    assert log_ticks(math.log10(0.4), math.log10(2.2)) == [0.5, 1.0, 2.0]
    assert time_ticks(250) == [0, 60, 120, 180, 240] and len(time_ticks(40 * 86400)) <= 8
    assert [time_label(each) for each in (40, 300, 5400, 7200)] == ["40 s", "5 min", "1 h 30 min", "2 h"]
    assert [number_label(each) for each in (0.0, 3e-5, 0.25, 12000)] == ["0", "3e-5", "0.25", "12,000"]


def test_what_lies_beyond_an_axis_is_drawn_at_its_end() -> None:
    axis = Axis(0.0, 1.0, 100.0, 200.0)
    assert [axis.at(each) for each in (-1.0, 0.5, 7.0)] == [100.0, 150.0, 200.0]


@pytest.mark.parametrize("x", [2.0**53, 1e17, -1e17, 1e29])
def test_a_lone_value_far_out_has_an_axis(x: float) -> None:
    """Where the next float is further away than 1."""
    for chart in (Chart("a"), Chart("a", over_time=True)):
        figure = line_chart(chart, [Series("value", [(x, 1.0, 1.0, 1.0)], 0)])
        assert figure.count("<circle") == 1 and "nan" not in figure.lower()

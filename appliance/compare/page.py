"""The page of a comparison: one HTML file that needs nothing else. Pure."""

from __future__ import annotations

import html
from collections.abc import Callable

from appliance.compare.judge import ArmResult, curve, verdict_text
from appliance.compare.results import StepRow
from appliance.compare.show import HEAD, Shown, cells, notes
from appliance.page import svg
from appliance.page.frame import code, document, table

_CURVES: tuple[tuple[str, str, Callable[[StepRow], float | None], bool], ...] = (
    ("Reward of sampled responses", "mean and range of the seeds", lambda row: row.reward, False),
    ("Mismatch, k3", "nats, logarithmic", lambda row: row.k3_kl, True),
    ("Truncated share", "of the tokens", lambda row: row.truncated, False),
    ("Largest weight before truncation", "logarithmic", lambda row: row.weight_max, True),
    ("Codes changed by an update", "share", lambda row: row.codes_changed, False),
    ("Time of a step", "s", lambda row: row.step_s, False),
)


def page(shown: Shown) -> str:
    """The whole document. Everything that a user wrote is escaped."""
    comparison = shown.comparison
    name = html.escape(comparison.name)
    return document(
        comparison.name,
        [
            f"<h1>{name}</h1>",
            f"<p>Made by {code(shown.command)}. {html.escape(shown.where)}</p>",
            _table(shown),
            *(f"<p>{_emphasised(note)}</p>" for note in notes(shown)),
            "<h2>Final validation, difference to the baseline</h2>",
            _intervals(shown.rows, margin=comparison.margin),
            "<h2>Curves</h2>",
            _legend(shown.rows),
            '<div class="charts">',
            *(_chart(title, unit, value, rows=shown.rows, logarithmic=log) for title, unit, value, log in _CURVES),
            "</div>",
            "<h2>Settings</h2>",
            f"<p>Recipe {code(comparison.recipe.stem)}, and in each arm:</p><ul>",
            *(f"<li>{html.escape(arm.name)}: {', '.join(map(code, arm.texts))}</li>" for arm in comparison.arms),
            "</ul>",
        ],
    )


def _table(shown: Shown) -> str:
    numbers = [place for place, (_, side) in enumerate(HEAD) if side == "right"]
    rows = [cells(row, margin=shown.comparison.margin) for row in shown.rows]
    return table([name for name, _ in HEAD], rows, numbers=numbers)


def _intervals(rows: list[ArmResult], *, margin: float) -> str:
    drawn = [
        (row.arm, row.difference.mean, row.difference.low, row.difference.high, index)
        for index, row in enumerate(rows)
        if row.difference is not None
    ]
    said = "; ".join(f"{row.arm}: {verdict_text(row, margin=margin)}" for row in rows)
    title = f"mean difference and 95 % interval; the band is ±{margin:g}"
    return f"{svg.interval_chart(title, drawn, margin=margin)}<p>{html.escape(said)}.</p>"


def _chart(
    title: str, unit: str, value: Callable[[StepRow], float | None], *, rows: list[ArmResult], logarithmic: bool
) -> str:
    series = [svg.Series(row.arm, curve(row.runs, value), index) for index, row in enumerate(rows)]
    return svg.line_chart(svg.Chart(title, unit, logarithmic=logarithmic), series)


def _legend(rows: list[ArmResult]) -> str:
    names = "".join(f"<span>{svg.swatch(index)} {html.escape(row.arm)}</span>" for index, row in enumerate(rows))
    return f'<p class="legend">{names}</p>'


def _emphasised(note: str) -> str:
    """`*word*` at the start of a note, as Markdown has it."""
    escaped = html.escape(note)
    if not escaped.startswith("*"):
        return escaped
    word, _, rest = escaped[1:].partition("*")
    return f"<em>{word}</em>{rest}"

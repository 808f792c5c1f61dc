"""The page of a comparison: one HTML file that needs nothing else. Pure."""

from __future__ import annotations

import html
from collections.abc import Callable

from appliance.compare import svg
from appliance.compare.judge import ArmResult, curve, verdict_text
from appliance.compare.results import StepRow
from appliance.compare.show import HEAD, Shown, cells, notes

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; }
th, td { padding: 4px 10px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
figure { margin: 0; } .charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 1rem; }
svg text { font: 11px system-ui, sans-serif; fill: currentColor; } svg .title { font-size: 13px; font-weight: 600; }
svg .grid { stroke: var(--line); } svg .margin { fill: var(--soft); } .swatch { vertical-align: middle; }
code { background: var(--soft); padding: 0 4px; border-radius: 3px; } .legend span { margin-right: 1.5rem; }
"""

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
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{name}</title>',
            f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>',
            f"<h1>{name}</h1>",
            f"<p>Made by <code>{html.escape(shown.command)}</code>. {html.escape(shown.where)}</p>",
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
            f"<p>Recipe <code>{html.escape(comparison.recipe.stem)}</code>, and in each arm:</p><ul>",
            *(f"<li>{html.escape(arm.name)}: {_codes(arm.texts)}</li>" for arm in comparison.arms),
            "</ul></body></html>",
            "",
        ]
    )


def _table(shown: Shown) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name, _ in HEAD)
    rows = [
        "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(row, margin=shown.comparison.margin))
        for row in shown.rows
    ]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>"


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
    return svg.line_chart(title, series, unit=unit, logarithmic=logarithmic)


def _legend(rows: list[ArmResult]) -> str:
    names = "".join(f"<span>{svg.swatch(index)} {html.escape(row.arm)}</span>" for index, row in enumerate(rows))
    return f'<p class="legend">{names}</p>'


def _codes(texts: tuple[str, ...]) -> str:
    return ", ".join(f"<code>{html.escape(text)}</code>" for text in texts)


def _emphasised(note: str) -> str:
    """`*word*` at the start of a note, as Markdown has it."""
    escaped = html.escape(note)
    if not escaped.startswith("*"):
        return escaped
    word, _, rest = escaped[1:].partition("*")
    return f"<em>{word}</em>{rest}"

"""The page of a comparison: one HTML file that needs nothing else. Pure."""

from __future__ import annotations

from collections.abc import Callable

from appliance.compare.judge import ArmResult, curve, verdict_text
from appliance.compare.show import HEAD, NUMBERS, Shown, cells, notes
from appliance.page import svg
from appliance.page.render import render
from appliance.record.events import StepMetrics

_CURVES: tuple[tuple[str, str, Callable[[StepMetrics], float | None], bool], ...] = (
    ("Reward of sampled responses", "mean and range of the seeds", lambda row: row.reward_mean, False),
    ("Mismatch, k3", "nats, logarithmic", lambda row: row.mismatch_k3_kl, True),
    ("Truncated share", "of the tokens", lambda row: row.is_truncated_fraction, False),
    ("Largest weight before truncation", "logarithmic", lambda row: row.is_weight_max, True),
    ("Codes changed by an update", "share", lambda row: row.codes_changed_fraction, False),
    ("Time of a step", "s", lambda row: row.step_s, False),
)


def page(shown: Shown) -> str:
    """The whole document. Everything that a user wrote is escaped."""
    comparison, rows = shown.comparison, shown.rows
    return render(
        "comparison.html.j2",
        title=comparison.name,
        command=shown.command,
        where=shown.where,
        head=HEAD,
        numbers=NUMBERS,
        rows=[cells(row, margin=comparison.margin) for row in rows],
        notes=map(_emphasised, notes(shown)),
        intervals=_intervals(rows, margin=comparison.margin),
        verdicts=[f"{row.arm}: {verdict_text(row, margin=comparison.margin)}" for row in rows],
        legend=[(svg.swatch(index), row.arm) for index, row in enumerate(rows)],
        charts=[_chart(title, unit, value, rows=rows, logarithmic=log) for title, unit, value, log in _CURVES],
        recipe=comparison.recipe.stem,
        arms=comparison.arms,
        reload_s=0,
        written=0,
    )


def _intervals(rows: list[ArmResult], *, margin: float) -> str:
    drawn = [
        (row.arm, row.difference.mean, row.difference.low, row.difference.high, index)
        for index, row in enumerate(rows)
        if row.difference is not None
    ]
    return svg.interval_chart(f"mean difference and 95 % interval; the band is ±{margin:g}", drawn, margin=margin)


def _chart(
    title: str, unit: str, value: Callable[[StepMetrics], float | None], *, rows: list[ArmResult], logarithmic: bool
) -> str:
    series = [svg.Series(row.arm, curve(row.runs, value), index) for index, row in enumerate(rows)]
    return svg.line_chart(svg.Chart(title, unit, logarithmic=logarithmic), series)


def _emphasised(note: str) -> tuple[str, str]:
    """(word, the rest) of a note that begins with `*word*`, as Markdown has it."""
    word, _, rest = note[1:].partition("*") if note.startswith("*") else ("", "", note)
    return word, rest

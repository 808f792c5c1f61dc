"""A comparison's table for people, its JSON for machines, its pages in Markdown and HTML. Pure."""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import dataclass

from appliance import console
from appliance.compare.file import Comparison
from appliance.compare.judge import CONFIDENCE, ArmResult, Interval, curve, numbers, verdict_text
from appliance.compare.results import RunResult
from appliance.corrections.registry import NONE
from appliance.page import svg
from appliance.page.render import render
from appliance.report import draw

TIMES_NOTE = "Other work was on the machine while some of these ran: their times are no measurements."
INACTIVE_NOTE = "*inactive*: nothing was ever truncated, masked or rejected, so the row says nothing about the method."


@dataclass(frozen=True)
class Shown:
    """What every form of the output starts from. where: machine and date, for the page."""

    comparison: Comparison
    rows: list[ArmResult]
    where: str
    command: str


_HEAD = (
    *("arm", "final", "difference", "95 % interval", "in its scheme", "k3 median", "k3 max", "truncated"),
    *("codes changed", "step", "run", "verdict"),
)
_CURVES = {  # name in our JSON: that in metrics.jsonl
    "step": "step",
    "reward": "reward_mean",
    "k3_kl": "mismatch_k3_kl",
    "truncated": "is_truncated_fraction",
    "weight_max": "is_weight_max",
    "codes_changed": "codes_changed_fraction",
    "step_s": "step_s",
    "validation": "val_reward_mean",
}
_CHARTS = (  # title, unit, field, logarithmic
    ("Reward of sampled responses", "mean and range of the seeds", "reward_mean", False),
    ("Mismatch, k3", "nats, logarithmic", "mismatch_k3_kl", True),
    ("Truncated share", "of the tokens", "is_truncated_fraction", False),
    ("Largest weight before truncation", "logarithmic", "is_weight_max", True),
    ("Codes changed by an update", "share", "codes_changed_fraction", False),
    ("Time of a step", "s", "step_s", False),
)
_MOST_POINTS = 4096  # of a curve that is drawn
_NUMBERS = range(1, len(_HEAD) - 1)  # places of the columns that stand on the right
assert CONFIDENCE == 0.95  # in the heading


def _cells(row: ArmResult, *, margin: float) -> tuple[str, ...]:
    """One text per column of the heading."""
    about = "~" if row.busy else ""
    interval = row.difference
    return (
        row.arm,
        draw.number(row.final, digits=4),
        "-" if interval is None else f"{interval.mean:+.4f}",
        "-" if interval is None else _bounds(interval),
        draw.number(row.own, digits=4),
        _short(row.k3_kl),
        _short(row.k3_max),
        "-" if row.method is NONE and not row.truncated else _share(row.truncated),
        _share(row.codes_changed),
        "-" if row.step_s is None else f"{about}{row.step_s:.2f} s",
        "-" if row.seconds is None else f"{about}{row.seconds:.0f} s",
        verdict_text(row, margin=margin),
    )


def table(shown: Shown, *, columns: int | None = None) -> str:
    """A line per arm, then notes. columns: as of console.table."""
    rows = [_cells(row, margin=shown.comparison.margin) for row in shown.rows]
    return "\n".join([console.table(rows, head=_HEAD, numbers=_NUMBERS, columns=columns), *_notes(shown)])


def _notes(shown: Shown) -> list[str]:
    """Sentences that belong below the table."""
    runs = [run for row in shown.rows for run in row.runs]
    seeds = ", ".join(map(str, shown.comparison.seeds))
    counts = sorted({len(run.rewards) for run in runs if run.rewards})  # there may be fewer than `validation`
    said = [
        f"final: mean reward of model/ in BF16, greedy, {' or '.join(map(str, counts)) or 'no'} problems, "
        f"seeds {seeds}; difference to {shown.comparison.baseline}, paired by seed and problem."
    ]
    if any(row.inactive for row in shown.rows):
        said.append(INACTIVE_NOTE)
    said += [note for run in runs if (note := _schemes(run))]
    about = "~" if any(row.busy for row in shown.rows) else ""
    if runs:
        together = draw.duration(sum(run.seconds for run in runs))
        said.append(f"All {len(runs)} runs together took {about}{together}, the final validation apart.")
    if about:
        said.append(f"~ {TIMES_NOTE}")
    return said


def _schemes(run: RunResult) -> str:
    """What became of the rollouts' scheme in the run; empty where it stayed."""
    steps = [step for step in run.steps if step.reward_mean is not None]
    changes = [now for before, now in itertools.pairwise(steps) if now.scheme != before.scheme]
    told = ", ".join(f"from step {step.step} on in {step.scheme}" for step in changes)
    return f"{run.arm}, seed {run.seed}: rollouts in {steps[0].scheme}, {told}." if changes else ""


def as_json(shown: Shown) -> str:
    """Numbers and curves of every run; the rewards of single problems stay in the runs' folders."""
    return json.dumps(
        {
            "schema_version": 1,
            "name": shown.comparison.name,
            "recipe": shown.comparison.recipe.name,
            "where": shown.where,
            "baseline": shown.comparison.baseline,
            "margin": shown.comparison.margin,
            "confidence": CONFIDENCE,
            "validation": shown.comparison.validation,
            "seeds": list(shown.comparison.seeds),
            "arms": [_arm(row, comparison=shown.comparison) for row in shown.rows],
        },
        indent=1,
    )


def _arm(row: ArmResult, *, comparison: Comparison) -> dict[str, object]:
    settings = next(arm for arm in comparison.arms if arm.name == row.arm).texts
    names = [field.name for field in dataclasses.fields(row)]
    return {
        **{name: getattr(row, name) for name in names if name not in ("runs", "difference", "by_seed")},
        "text": verdict_text(row, margin=comparison.margin),
        "settings": list(settings),
        "difference": dataclasses.asdict(row.difference) if row.difference else None,
        "by_seed": [{"seed": seed, **dataclasses.asdict(interval)} for seed, interval in row.by_seed],
        "runs": [_run(run) for run in row.runs],
    }


def _run(run: RunResult) -> dict[str, object]:
    return {
        "seed": run.seed,
        "folder": run.folder,
        "state": run.state,
        "reason": run.reason,
        "final": run.final,
        "problems": len(run.rewards),
        "seconds": round(run.seconds, 1),
        "busy": run.busy,
        **{name: [getattr(step, field) for step in run.steps] for name, field in _CURVES.items()},
        "scheme": list(dict.fromkeys(row.scheme for row in run.steps)),
    }


def markdown(shown: Shown) -> str:
    """The page for a repository."""
    comparison = shown.comparison
    lines = [
        f"# {comparison.name}",
        "",
        f"Made by `{shown.command}`; every number and curve is in `{comparison.name}.json`.",
        shown.where,
        "",
        f"| {' | '.join(_HEAD)} |",
        f"|{' --- |' * len(_HEAD)}",
        *(f"| {' | '.join(_cells(row, margin=comparison.margin))} |" for row in shown.rows),
        "",
        *(f"{note}\n" for note in _notes(shown)),
        "## By seed",
        "",
        "| arm | seed | state | steps | final | difference | 95 % interval | k3 max | truncated, worst step |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(line for row in shown.rows for line in _seed_lines(row)),
        "",
        "## Settings",
        "",
        f"Recipe `{comparison.recipe.stem}`, and in each arm:",
        "",
        *(f"* {arm.name}: {', '.join(f'`{each}`' for each in arm.texts)}" for arm in comparison.arms),
        "",
    ]
    return "\n".join(lines)


def _seed_lines(row: ArmResult) -> list[str]:
    intervals = dict(row.by_seed)
    lines = []
    for run in row.runs:
        interval = intervals.get(run.seed)
        k3 = max(numbers(run.steps, "mismatch_k3_kl"), default=None)
        truncated = max(numbers(run.steps, "is_truncated_fraction"), default=None)
        difference = "- | -" if interval is None else f"{interval.mean:+.4f} | {_bounds(interval)}"
        steps = run.steps[-1].step if run.steps else 0
        lines.append(
            f"| {row.arm} | {run.seed} | {run.state} | {steps} | {draw.number(run.final, digits=4)} | {difference} "
            f"| {_short(k3)} | {_share(truncated)} |"
        )
    return lines


def _bounds(interval: Interval) -> str:
    return f"{interval.low:+.4f} .. {interval.high:+.4f}"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _share(value: float | None) -> str:
    """As a percentage; what is not zero never looks like it."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    return f"{100 * value:.2f} %" if value >= 1e-4 else "< 0.01 %"


def page(shown: Shown) -> str:
    """One HTML file that needs nothing else. Everything that a user wrote is escaped."""
    comparison, rows = shown.comparison, shown.rows
    intervals = [
        (row.arm, row.difference.mean, row.difference.low, row.difference.high, index)
        for index, row in enumerate(rows)
        if row.difference is not None
    ]
    about = f"mean difference and 95 % interval; the band is ±{comparison.margin:g}"
    return render(
        "comparison.html.j2",
        title=comparison.name,
        command=shown.command,
        where=shown.where,
        head=_HEAD,
        numbers=_NUMBERS,
        rows=[_cells(row, margin=comparison.margin) for row in rows],
        notes=map(_emphasised, _notes(shown)),
        intervals=svg.interval_chart(about, intervals, margin=comparison.margin),
        verdicts=[f"{row.arm}: {verdict_text(row, margin=comparison.margin)}" for row in rows],
        legend=[(svg.swatch(index), row.arm) for index, row in enumerate(rows)],
        charts=[
            svg.line_chart(
                svg.Chart(title, unit, logarithmic=logarithmic),
                [_series(row, field, index=index) for index, row in enumerate(rows)],
            )
            for title, unit, field, logarithmic in _CHARTS
        ],
        recipe=comparison.recipe.stem,
        arms=comparison.arms,
        reload_s=0,
        written=0,
    )


def _series(row: ArmResult, field: str, *, index: int) -> svg.Series:
    """field: of Step."""
    points = curve(row.runs, field)
    return svg.Series(row.arm, svg.thinned(points, most=_MOST_POINTS), index, newest=points[-1][1] if points else None)


def _emphasised(note: str) -> tuple[str, str]:
    """(word, the rest) of a note that begins with `*word*`, as Markdown has it."""
    word, _, rest = note[1:].partition("*") if note.startswith("*") else ("", "", note)
    return word, rest

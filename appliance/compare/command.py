"""`appliance compare`: every run that is not there yet, one after the other. After each, its model is validated and the
table for people, the JSON for machines and the pages in Markdown and HTML are written anew; how they look is pure."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import shlex
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance import console
from appliance.compare.arms import (
    Existing,
    PlannedRun,
    look_at_run,
    plan_runs,
    refuse_other_commit,
    resumed_run,
    set_aside,
)
from appliance.compare.file import Comparison, load_comparison
from appliance.compare.interval import CONFIDENCE, Interval
from appliance.compare.judge import ArmResult, curve, field_values, judge, verdict_text
from appliance.compare.results import RunResult, busy_share, note_busy, read_result, validate_models
from appliance.compare.stored import SUFFIX, StoredRun, date_of, read_results, result_of, write_results
from appliance.corrections.registry import NONE
from appliance.errors import GuardStop, Interrupted, RecipeError, SavedAndStopped
from appliance.files import write_whole
from appliance.finding import fault
from appliance.launch.side_job import stop_on_errors
from appliance.launch.train import run_training
from appliance.page import render, svg
from appliance.profile.command import BEFORE_TRAINING
from appliance.recipe.load import to_yaml
from appliance.record.session import asked_to_stop, cannot_write
from appliance.report import draw
from appliance.report.summary import typed_path
from appliance.signals import Interrupts
from appliance.terms.counts import counted

_SIGNALLED = (SavedAndStopped.exit_code, Interrupted.exit_code)
_MOST_FAILURES = 2  # in a row: the next one would fail as well
TIMES_NOTE = "Other work was on the machine while some of these ran: their times are no measurements."
INACTIVE_NOTE = "*inactive*: nothing was ever truncated, masked or rejected, so the row says nothing about the method."
_HEAD = (
    *("arm", "final", "difference", "95 % interval", "in its scheme", "k3 median", "k3 max", "truncated"),
    *("codes changed", "step", "run", "verdict"),
)
COLUMNS = (  # what they say, for the page in Markdown
    "**final**: mean reward of the trained models, generating in BF16; **in its scheme**: the same by the trainer's "
    "last validation, in the scheme that the run's rollouts had.",
    "**difference**, **95 % interval**: of `final`, by a bootstrap over seeds and problems.",
    "**k3 median**, **k3 max**: how far the rollouts' policy was from the trainer's in a step, nats per token; over "
    "all steps of all seeds.",
    "**truncated**: share of a step's tokens whose weight the correction cut, or which it dropped, mean over all "
    "steps; `-` where there is no correction.",
    "**codes changed**: share of the quantised weights' codes that one weight update changed, median.",
    "**step**: seconds of a step, median; **run**: seconds of a whole run, mean.",
    "**verdict**: where the whole interval lies: *within* the margin (the number after ±), below it (*fails*), above "
    "it (*better*), or across one of its bounds (*open*). In brackets: seeds whose own interval lies below it, or that "
    "a guard stopped.",
)
_CURVES = {  # name in our JSON: that in metrics.jsonl
    "step": "step",
    "reward": "reward_mean",
    "k3_kl": "mismatch_k3_kl",
    "truncated": "is_truncated_fraction",
    "weight_max": "is_weight_max",
    "codes_changed": "codes_changed_fraction",
    "learning_rate": "learning_rate",
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
_NUMBERS = range(1, len(_HEAD) - 1)  # places of the columns that are aligned to the right
assert CONFIDENCE == 0.95  # in the heading


@dataclass(frozen=True)
class ComparisonReport:
    """Values that every form of the output is made from."""

    comparison: Comparison
    rows: list[ArmResult]
    where: str
    """Machine and date, for the page."""
    command: str


def run_compare(name_or_path: str, *, json_mode: bool, results_file: Path | None = None) -> int:
    """Run a comparison and return the exit code: 0, or that of the first run that failed. results_file: of an earlier
    comparison; runs whose result is in it are not trained again.

    Raises RecipeError with all problems of the file and of all arms, PreflightError for what this host cannot do,
    EngineError when the final validation fails, Interrupted after a signal.
    """
    comparison = load_comparison(name_or_path)
    stored = read_results(results_file) if results_file is not None else []
    runs = plan_runs(comparison, date=date_of(stored))
    stop_on_errors(list(dict.fromkeys(finding for run in runs for finding in run.findings)))
    folder = runs[0].run_dir.parent
    command = f"appliance compare {shlex.quote(name_or_path)}"
    if results_file is not None:
        command += f" --results {shlex.quote(str(results_file))}"
    known = _known(runs, stored=stored, results_file=results_file) if results_file is not None else {}
    here = [run for run in runs if run.label not in known]
    todo = _todo(here, folder=folder, file=comparison.file)
    with Interrupts() as interrupts:

        def stop() -> None:
            if interrupts.names:
                raise _stopped(command)

        def validate_and_write() -> ComparisonReport:
            validate_models(here, stop=stop)
            return _write(comparison, runs=runs, known=known, command=command)

        failed = _train(todo, total=len(runs), stop=stop, run_ended=validate_and_write, command=command)
        shown = validate_and_write()
    console.out(as_json(shown) if json_mode else table(shown, columns=console.columns()))
    console.say(f"page        {typed_path(folder / f'{comparison.name}.html')}  (and .json, .md, {SUFFIX})")
    for run, code in failed:
        console.say(f"warning: {run.label}: failed with exit code {code}, see {typed_path(run.run_dir)}")
    return failed[0][1] if failed else 0


def _known(runs: list[PlannedRun], *, stored: list[StoredRun], results_file: Path) -> dict[str, RunResult]:
    """Stored results by the labels of the runs that they are of. Raises RecipeError where the file is the one that this
    comparison will write, and lines of it would be lost."""
    results, others = {}, []
    for run in runs:
        result, differs = result_of(run, stored=stored)
        if result is not None:
            results[run.label] = result
        elif differs:
            others.append(f"{run.label}: its stored result is not used: {differs}")
    output = runs[0].run_dir.parent / f"{runs[0].recipe.name}{SUFFIX}"
    if len(results) < len(stored) and results_file.resolve() == output.resolve():
        message = f"{len(stored) - len(results)} of its results are of other runs, and would be overwritten"
        raise RecipeError([fault((f"--results {results_file}",), message, "give a copy of it")])
    have = counted(len(runs), "run has its result", plural="runs have their result")
    console.say(f"{len(results)} of {have} in {typed_path(results_file)}")
    for text in others:
        console.say(text)
    return results


def _stopped(command: str) -> Interrupted:
    return Interrupted("the comparison was stopped", hint=f"`{command}` runs what is missing")


def _todo(runs: list[PlannedRun], *, folder: Path, file: Path) -> list[PlannedRun]:
    """Return the runs without a result, ready to start. file: of the comparison. Raises PreflightError."""
    states = {run.label: look_at_run(run) for run in runs}
    if any(each is not Existing.DONE for each in states.values()):
        going_on = (Existing.DONE, Existing.UNFINISHED)
        refuse_other_commit([run for run in runs if states[run.label] in going_on], file=file)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    done = sum(each is Existing.DONE for each in states.values())
    console.say(f"{counted(len(runs), 'run')} in {typed_path(folder)}" + (f", {done} of them done" if done else ""))
    return [_ready(run, state=states[run.label]) for run in runs if states[run.label] is not Existing.DONE]


def _ready(run: PlannedRun, *, state: Existing) -> PlannedRun:
    """Return the run as it is to be started: from its newest whole checkpoint, or from the start, with what is in its
    way set aside."""
    if state is Existing.NOTHING:
        return run
    resumed = resumed_run(run) if state is Existing.UNFINISHED else None
    if resumed is not None and resumed.resume is not None:
        console.say(f"{run.label}: resumes after step {resumed.resume.step}")
        return resumed
    why = "stopped before it saved anything" if state is Existing.UNFINISHED else "of another recipe or other problems"
    console.say(f"{run.label}: {why}, set aside as {set_aside(run.run_dir).name}")
    return run


def _train(
    todo: list[PlannedRun],
    *,
    total: int,
    stop: Callable[[], None],
    run_ended: Callable[[], object],
    command: str,
) -> list[tuple[PlannedRun, int]]:
    """Train what is missing; a stop by a guard is a result. run_ended: called after each run that has a result. Returns
    the runs that failed, with their exit codes."""
    failed: list[tuple[PlannedRun, int]] = []
    in_a_row = 0
    for number, run in enumerate(todo, start=total - len(todo) + 1):
        stop()
        busy = busy_share()
        console.say(f"run {number} of {total}: {run.label}")
        code = run_training(
            run.plan,
            recipe_yaml=to_yaml(run.recipe),
            findings=run.findings,
            name=run.run_dir.name,
            json_mode=False,
            stages=BEFORE_TRAINING,
            quiet=True,
            resume=run.resume,
        )
        if code not in _SIGNALLED:
            with contextlib.suppress(OSError):  # a full disk: its times are then no measurements
                note_busy(run.run_dir, share=busy)
        if code in _SIGNALLED or asked_to_stop(run.run_dir):  # it may have come with a fault, or when all was done
            raise _stopped(command)
        if code in (0, GuardStop.exit_code):
            in_a_row = 0
            console.say(_line(run))
            run_ended()
            continue
        failed.append((run, code))
        in_a_row += 1
        if in_a_row == _MOST_FAILURES:
            console.say(f"warning: {in_a_row} runs in a row failed: the others are not started")
            break
    return failed


def _line(run: PlannedRun) -> str:
    result = read_result(run)
    assert result is not None, "it has just ended"
    steps = [step for step in result.steps if step.reward_mean is not None]
    climb = f"reward {steps[0].reward_mean:.3f} -> {steps[-1].reward_mean:.3f}, " if steps else ""
    end = "" if not result.reason else f", {result.reason}"
    return (
        f"{run.label}: {climb}{counted(steps[-1].step if steps else 0, 'step')} in {draw.duration(result.seconds)}{end}"
    )


def _where(results: Sequence[RunResult]) -> str:
    """Return the days on which the runs ended, and the machines: the table may be made again long after, and
    elsewhere."""
    ended = [datetime.date.fromtimestamp(result.ended) for result in results if result.ended]
    ended = ended or [datetime.date.today()]
    days = " to ".join(dict.fromkeys(day.isoformat() for day in (min(ended), max(ended))))
    hosts = "; ".join(dict.fromkeys(result.host for result in results)) or "no run"
    return f"Taken on {days}: {hosts}."


def _write(
    comparison: Comparison, *, runs: list[PlannedRun], known: dict[str, RunResult], command: str
) -> ComparisonReport:
    """Judge the runs that have a result, and write the page and the numbers, each whole or not at all. known: results
    from `--results`, by the labels of their runs.  Raises PreflightError."""
    with_results = [(run, result) for run in runs if (result := known.get(run.label) or read_result(run)) is not None]
    results = [result for _, result in with_results]
    rows = judge(
        results,
        arms=[arm.name for arm in comparison.arms],
        baseline=comparison.baseline,
        margin=comparison.margin,
        seeds=len(comparison.seeds),
        against=comparison.against,
    )
    shown = ComparisonReport(comparison, rows=rows, where=_where(results), command=command)
    folder, name = runs[0].run_dir.parent, comparison.name
    try:
        for suffix, text in (("json", as_json(shown) + "\n"), ("md", markdown(shown)), ("html", page(shown))):
            write_whole(folder / f"{name}.{suffix}", text)
        write_results(folder / f"{name}{SUFFIX}", runs=with_results)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return shown


def _cells(row: ArmResult, *, margin: float) -> tuple[str, ...]:
    """Return one text per column of the heading."""
    about = "~" if row.busy else ""
    interval = row.difference
    return (
        row.arm,
        draw.number(row.final, digits=4),
        "-" if interval is None else f"{interval.mean:+.4f}",
        "-" if interval is None else _bounds(interval),
        draw.number(row.trainer_final, digits=4),
        _short(row.k3_kl),
        _short(row.k3_max),
        "-" if row.method is NONE and not row.truncated else _share(row.truncated),
        _share(row.codes_changed),
        "-" if row.step_s is None else f"{about}{row.step_s:.2f} s",
        "-" if row.seconds is None else f"{about}{row.seconds:.0f} s",
        verdict_text(row, margin=margin),
    )


def table(shown: ComparisonReport, *, columns: int | None = None) -> str:
    """Render a line per arm, then notes. columns: as for console.table."""
    rows = [_cells(row, margin=shown.comparison.margin) for row in shown.rows]
    return "\n".join([console.table(rows, head=_HEAD, numbers=_NUMBERS, columns=columns), *_notes(shown)])


def _notes(shown: ComparisonReport) -> list[str]:
    """Return sentences that belong below the table."""
    runs = [run for row in shown.rows for run in row.runs]
    seeds = ", ".join(map(str, shown.comparison.seeds))
    counts = sorted({len(run.rewards) for run in runs if run.rewards})  # there may be fewer than `validation`
    other = "".join(f", of {arm} to {base}" for arm, base in shown.comparison.against.items())
    notes = [
        f"final: mean reward of model/ in BF16, greedy, {' or '.join(map(str, counts)) or 'no'} problems, "
        f"seeds {seeds}; difference to {shown.comparison.baseline}{other}, paired by seed and problem."
    ]
    if widths := [(row.difference.high - row.difference.low) / 2 for row in shown.rows if row.difference is not None]:
        notes.append(
            f"An interval reaches {statistics.median(widths):.3f} to each side in the median of the arms, "
            f"{max(widths):.3f} at most: a smaller difference could not have been shown."
        )
    if any(row.inactive for row in shown.rows):
        notes.append(INACTIVE_NOTE)
    notes += [note for run in runs if (note := _schemes(run))]
    about = "~" if any(row.busy for row in shown.rows) else ""
    if runs:
        together = draw.duration(sum(run.seconds for run in runs))
        all_runs = "The run" if len(runs) == 1 else f"All {len(runs)} runs together"
        notes.append(f"{all_runs} took {about}{together}, the final validation apart.")
    if about:
        notes.append(f"~ {TIMES_NOTE}")
    return notes


def _schemes(run: RunResult) -> str:
    """Say what became of the rollouts' scheme in the run; empty where it stayed."""
    steps = [step for step in run.steps if step.reward_mean is not None]
    changes = [now for before, now in itertools.pairwise(steps) if now.scheme != before.scheme]
    told = ", ".join(f"from step {step.step} on in {step.scheme}" for step in changes)
    return f"{run.arm}, seed {run.seed}: rollouts in {steps[0].scheme}, {told}." if changes else ""


def as_json(shown: ComparisonReport) -> str:
    """Write numbers and curves of every run as JSON; the rewards of single problems stay in the runs' folders."""
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
        "own": run.trainer_final,
        "problems": len(run.rewards),
        "seconds": round(run.seconds, 1),
        "busy": run.busy,
        **{name: [getattr(step, field) for step in run.steps] for name, field in _CURVES.items()},
        "scheme": list(dict.fromkeys(row.scheme for row in run.steps)),
    }


def markdown(shown: ComparisonReport) -> str:
    """Render the page for a repository, in Markdown."""
    comparison = shown.comparison
    lines = [
        f"# {comparison.name}",
        "",
        f"Made by `{shown.command}`; every number and curve is in [{comparison.name}.json]({comparison.name}.json).",
        shown.where,
        "",
        f"| {' | '.join(_HEAD)} |",
        f"|{' --- |' * len(_HEAD)}",
        *(f"| {' | '.join(_cells(row, margin=comparison.margin))} |" for row in shown.rows),
        "",
        *(f"{note}\n" for note in _notes(shown)),
        "## What the columns say",
        "",
        *(f"* {column}" for column in COLUMNS),
        "",
        "## By seed",
        "",
        "| arm | seed | state | steps | final | difference | 95 % interval | in its scheme | k3 max "
        "| truncated, worst step |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
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
        k3 = max(field_values(run.steps, "mismatch_k3_kl"), default=None)
        truncated = max(field_values(run.steps, "is_truncated_fraction"), default=None)
        difference = "- | -" if interval is None else f"{interval.mean:+.4f} | {_bounds(interval)}"
        steps = run.steps[-1].step if run.steps else 0
        lines.append(
            f"| {row.arm} | {run.seed} | {run.state} | {steps} | {draw.number(run.final, digits=4)} | {difference} "
            f"| {draw.number(run.trainer_final, digits=4)} | {_short(k3)} | {_share(truncated)} |"
        )
    return lines


def _bounds(interval: Interval) -> str:
    return f"{interval.low:+.4f} .. {interval.high:+.4f}"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _share(value: float | None) -> str:
    """Format a percentage; what is not zero never looks like it."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    return f"{100 * value:.2f} %" if value >= 1e-4 else "< 0.01 %"


def page(shown: ComparisonReport) -> str:
    """Render the page as one HTML file that needs nothing else. Everything that a user wrote is escaped."""
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
    """Return (word, the rest) of a note that begins with `*word*`, as Markdown has it."""
    word, _, rest = note[1:].partition("*") if note.startswith("*") else ("", "", note)
    return word, rest

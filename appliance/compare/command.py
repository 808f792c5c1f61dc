"""`appliance compare`: every run that is not there yet, one after the other, then the table and the page."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Callable
from pathlib import Path

from appliance import console
from appliance.compare.arms import Existing, PlannedRun, look, plan_runs, refuse_other_commit, resumed_run, set_aside
from appliance.compare.file import load_comparison
from appliance.compare.judge import judge
from appliance.compare.results import busy_share, note_busy, read_result, validate_models
from appliance.compare.show import Shown, as_json, markdown, page, table
from appliance.errors import GuardStop, Interrupted, SavedAndStopped
from appliance.files import write_whole
from appliance.launch.side_job import stop_on_errors
from appliance.launch.train import run_training
from appliance.preflight.probes import read_host
from appliance.profile.command import BEFORE_TRAINING
from appliance.recipe.load import to_yaml
from appliance.record.session import asked_to_stop, cannot_write
from appliance.report import draw
from appliance.report.summary import typed_path
from appliance.signals import Interrupts

_SIGNALLED = (SavedAndStopped.exit_code, Interrupted.exit_code)
_MOST_FAILURES = 2  # in a row: the next one would fail as well


def run_compare(name_or_path: str, *, json_mode: bool) -> int:
    """The exit code: 0, or that of the first run that failed.

    Raises RecipeError with all problems of the file and of all arms, PreflightError for what this host cannot do,
    EngineError when the final validation fails, Interrupted after a signal.
    """
    comparison = load_comparison(name_or_path)
    runs = plan_runs(comparison)
    stop_on_errors(list(dict.fromkeys(finding for run in runs for finding in run.findings)))
    folder = runs[0].run_dir.parent
    command = f"appliance compare {shlex.quote(name_or_path)}"
    todo = _todo(runs, folder=folder, file=comparison.file)
    with Interrupts() as interrupts:

        def stop() -> None:
            if interrupts.names:
                raise _stopped(command)

        failed = _train(todo, total=len(runs), stop=stop, command=command)
        validate_models(runs, stop=stop)
    rows = judge(
        [result for result in map(read_result, runs) if result is not None],
        arms=[arm.name for arm in comparison.arms],
        baseline=comparison.baseline,
        margin=comparison.margin,
        seeds=len(comparison.seeds),
    )
    shown = Shown(comparison, rows=rows, where=_where(folder), command=command)
    _write(shown, folder=folder)
    console.out(as_json(shown) if json_mode else table(shown, columns=console.columns()))
    console.say(f"page        {typed_path(folder / f'{comparison.name}.html')}  (and .json, .md)")
    for run, code in failed:
        console.say(f"warning: {run.label}: failed with exit code {code}, see {typed_path(run.run_dir)}")
    return failed[0][1] if failed else 0


def _stopped(command: str) -> Interrupted:
    return Interrupted("the comparison was stopped", hint=f"`{command}` goes on with what is missing")


def _todo(runs: list[PlannedRun], *, folder: Path, file: Path) -> list[PlannedRun]:
    """The runs without a result, ready to start. file: of the comparison.  Raises PreflightError."""
    found = {run.label: look(run) for run in runs}
    if any(each is not Existing.DONE for each in found.values()):
        going_on = (Existing.DONE, Existing.UNFINISHED)
        refuse_other_commit([run for run in runs if found[run.label] in going_on], file=file)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    done = sum(each is Existing.DONE for each in found.values())
    console.say(f"{len(runs)} runs in {typed_path(folder)}" + (f", {done} of them done" if done else ""))
    return [_ready(run, found=found[run.label]) for run in runs if found[run.label] is not Existing.DONE]


def _ready(run: PlannedRun, *, found: Existing) -> PlannedRun:
    """The run as it is to be started: from its newest whole checkpoint, or anew, with what is in its way set aside."""
    if found is Existing.NOTHING:
        return run
    resumed = resumed_run(run) if found is Existing.UNFINISHED else None
    if resumed is not None and resumed.resume is not None:
        console.say(f"{run.label}: goes on after step {resumed.resume.step}")
        return resumed
    why = "stopped before it saved anything" if found is Existing.UNFINISHED else "of another recipe or other problems"
    console.say(f"{run.label}: {why}, set aside as {set_aside(run.run_dir).name}")
    return run


def _train(
    todo: list[PlannedRun], *, total: int, stop: Callable[[], None], command: str
) -> list[tuple[PlannedRun, int]]:
    """Train what is missing; a stop by a guard is a result. Returns the runs that failed, with their exit codes."""
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
            steps=BEFORE_TRAINING,
            quiet=True,
            resume=run.resume,
        )
        if code not in _SIGNALLED:
            note_busy(run.run_dir, share=busy)
        if code in _SIGNALLED or asked_to_stop(run.run_dir):  # it may have come with a fault, or when all was done
            raise _stopped(command)
        if code in (0, GuardStop.exit_code):
            in_a_row = 0
            console.say(_line(run))
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
    return f"{run.label}: {climb}{steps[-1].step if steps else 0} steps in {draw.duration(result.seconds)}{end}"


def _where(folder: Path) -> str:
    host = read_host(folder)
    gpus = f", {len(host.gpus)} x {host.gpus[0].product}" if host.gpus else ""
    today = datetime.date.today().isoformat()
    return f"Taken on {today}: {host.processor or 'unknown processor'}, {host.cores} cores{gpus}."


def _write(shown: Shown, *, folder: Path) -> None:
    """The page and the numbers, each whole or not at all. Raises PreflightError."""
    name = shown.comparison.name
    for suffix, text in (("json", as_json(shown) + "\n"), ("md", markdown(shown)), ("html", page(shown))):
        try:
            write_whole(folder / f"{name}.{suffix}", text)
        except OSError as error:
            raise cannot_write(folder, error) from error

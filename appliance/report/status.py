"""`appliance status`: where a run is, from its folder alone."""

from __future__ import annotations

import contextlib
import json
import os.path
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from appliance import console
from appliance.errors import RecipeError
from appliance.record.checkpoints import in_order, step_of
from appliance.record.events import RunTail
from appliance.record.plan import RunPlan, read_plan
from appliance.record.session import RUN_FILE, RunRecord, RunStatus, has_launcher, read_record
from appliance.record.state import RunState, fold, median_tokens_per_s, remaining_s
from appliance.report import display, draw, summary

_UNFINISHED = (RunStatus.STARTING, RunStatus.RUNNING)
_LOST = "its launcher is gone"
_MOST_NAMES = 10


def find_run(run: str, *, run_root: Path) -> Path:
    """The folder of a run, given by its path or its name under the run root. Raises RecipeError when there is none."""
    for folder in (Path(run), run_root / run):
        if os.path.isfile(folder / RUN_FILE):  # unlike Path.is_file it takes any text
            return folder.absolute()
    names = sorted(path.parent.name for path in run_root.glob(f"*/{RUN_FILE}"))
    hint = f"runs in {run_root}: {', '.join(names[-_MOST_NAMES:])}" if names else f"there are no runs in {run_root}"
    raise RecipeError([(f"run `{run}`: no folder of that path or name with a {RUN_FILE}", hint)])


@contextlib.contextmanager
def reading(run_dir: Path) -> Iterator[None]:
    """An OSError inside, for a file of another user or a folder in a file's place, is a RecipeError."""
    try:
        yield
    except OSError as error:
        raise RecipeError([(f"{run_dir}: cannot be read as a run: {error}", "")]) from error


def print_status(run: str, *, run_root: Path, json_mode: bool = False) -> None:
    """Raises RecipeError when there is no such run or its files cannot be read."""
    run_dir = find_run(run, run_root=run_root)
    plan, record = read_run(run_dir)
    state = RunState(steps=plan.steps)
    with reading(run_dir):
        saved = in_order(run_dir)
        for news in RunTail(run_dir).read():
            state = fold(state, news)
    if json_mode:
        steps = [step_of(folder) for folder in saved]
        document = {**asdict(record), "run_dir": str(run_dir), **_numbers(state), "checkpoint_steps": steps}
        console.out(json.dumps(document))
        return
    rows = status_rows(plan, record, state, folder=summary.typed_path(run_dir))
    console.out(console.table((*rows, *_saved_rows(run_dir, record, saved=saved))))


def status_rows(plan: RunPlan, record: RunRecord, state: RunState, *, folder: str) -> tuple[tuple[str, str], ...]:
    """(label, text) pairs; what is not known yet is left out."""
    rows = [("run", display.title(plan)), ("state", _state_text(record))]
    if record.state in _UNFINISHED:
        rows.append(("phase", display.phase_text(record.phase)))
    left = remaining_s(state, now=0.0) if state.work is None and record.state in _UNFINISHED else None
    rows.append(("step", f"{state.step} of {state.steps}" + (f", about {draw.duration(left)} left" if left else "")))
    if state.rewards:
        rows.append(("reward", f"{state.rewards[-1]:.3f} in step {state.step}, {state.rewards[0]:.3f} in the first"))
    if state.val_last is not None:
        rows.append(("validation", display.validation_text(state)))
    if state.last is not None:
        rows.append(("speed", f"{draw.tokens_per_s(median_tokens_per_s(state))} of rollout (median)"))
        rows.append(("mismatch", f"fine in {len(state.rewards) - state.unhealthy_steps} of {len(state.rewards)} steps"))
    if state.failure is not None and record.state is RunStatus.FAILED:
        rows.append(("hint", state.failure.hint))
    rows.append(("folder", folder))
    return tuple((label, text) for label, text in rows if text)


def _saved_rows(run_dir: Path, record: RunRecord, *, saved: list[Path]) -> list[tuple[str, str]]:
    rows = [("attempts", str(record.attempt))] if record.attempt > 1 else []
    if (page := run_dir / summary.REPORT_FILE).is_file():
        rows.append(("report", summary.typed_path(page)))
    if saved:
        rows.append(("checkpoint", f"{saved[-1].name}, the newest of {len(saved)}"))
    if saved and record.state in (RunStatus.FAILED, RunStatus.STOPPED):
        rows.append(("go on", summary.go_on_command(run_dir)))
    return rows


def _state_text(record: RunRecord) -> str:
    code = "" if record.exit_code is None else f" (exit code {record.exit_code})"
    reason = f": {record.reason}" if record.reason else ""
    return f"{record.state}{code}{reason}"


def read_run(run_dir: Path) -> tuple[RunPlan, RunRecord]:
    """A run that says it goes on and has no launcher any more is stopped. Raises RecipeError."""
    try:
        plan, record = read_plan(run_dir / "plan.json"), read_record(run_dir)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RecipeError([(f"{run_dir}: cannot be read as a run: {error}", "")]) from error
    if record.state in _UNFINISHED and not has_launcher(run_dir):
        return plan, RunRecord(RunStatus.STOPPED, phase=record.phase, attempt=record.attempt, reason=_LOST)
    return plan, record


def _numbers(state: RunState) -> dict[str, float | int | None]:
    return {
        "step": state.step,
        "steps": state.steps,
        "reward_mean": state.rewards[-1] if state.rewards else None,
        "val_reward_before": state.val_first,
        "val_reward_mean": state.val_last,
        "rollout_tokens_per_s": median_tokens_per_s(state),
    }

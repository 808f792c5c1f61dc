"""What lies in the folder of a planned run already: nothing, the very run, or something that is set aside."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from pathlib import Path

from appliance.compare.arms import PlannedRun
from appliance.errors import PreflightError, RecipeError
from appliance.launch.resume import Target, has_problems_of, original_plan
from appliance.plan.build import OriginalPlan
from appliance.recipe.load import to_yaml
from appliance.record.session import RUN_FILE, RunRecord, RunStatus, cannot_write, has_launcher, read_record

_GUARD_STOPPED = 6


class Existing(Enum):
    """DONE: the result of this very recipe is there, be it a model or a stop by the guard.  NOTHING: the way is free.

    UNFINISHED: an attempt of this very recipe that did not end well.  OTHER: another recipe or other problems (their
    files changed), or no run at all.
    """

    DONE = "done"
    NOTHING = "nothing"
    UNFINISHED = "unfinished"
    OTHER = "other"


def look(run: PlannedRun) -> Existing:
    """Raises PreflightError when the run is being made by another program at this moment."""
    folder = run.run_dir
    if not folder.exists():
        return Existing.NOTHING
    try:
        record, recipe = read_record(folder), (folder / "recipe.yaml").read_text()
    except (OSError, ValueError):
        return Existing.OTHER
    if record.exit_code is None and has_launcher(folder):
        raise PreflightError(f"{folder}: this run is going on", hint="wait for its end, or stop it")
    if recipe != _as_begun(run) or not (_other_commit(run) or _has_its_problems(run)):
        return Existing.OTHER
    return Existing.DONE if has_result(record) else Existing.UNFINISHED


def refuse_other_commit(runs: Iterable[PlannedRun], *, file: Path) -> None:
    """Rewards are compared, so all runs train one commit of a model on the hub. Raises PreflightError with the way on.

    runs: that are there already.  file: of the comparison.
    """
    for run in runs:
        if began_with := _other_commit(run):
            model = run.plan.model
            message = f"{run.label}: {model.hub_name}: {model.revision or 'main'} is {model.commit} on the hub now, "
            hint = f"to go on with what is there: model.revision: {began_with} in {file}, under `set` or in the arm"
            raise PreflightError(f"{message}the run began with {began_with}", hint=hint)


def _other_commit(run: PlannedRun) -> str:
    """The commit that the run began with, where the same revision is another one now. Empty where it is not, or nobody
    knows: an offline hub."""
    original, model = _original_plan(run), run.plan.model
    if original is None or original.model != model.hub_name or not model.commit or original.commit == model.commit:
        return ""
    return original.commit


def _as_begun(run: PlannedRun) -> str:
    """The recipe; one that names the very commit that the run began with, as the run has it, without or by a tag."""
    original = _original_plan(run)
    model = run.recipe.model
    if original is not None and model.revision and original.commit == model.revision:
        model = model.model_copy(update={"revision": original.revision or None})
    return to_yaml(run.recipe.model_copy(update={"model": model}))


def _original_plan(run: PlannedRun) -> OriginalPlan | None:
    """None where the run's plan cannot be read."""
    try:
        return original_plan(Target(run.run_dir, read_record(run.run_dir)))
    except (RecipeError, OSError, ValueError):
        return None


def _has_its_problems(run: PlannedRun) -> bool:
    try:
        return has_problems_of(run.plan, run_dir=run.run_dir)
    except RecipeError:  # its plan cannot be read
        return False


def has_result(record: RunRecord) -> bool:
    """Done, or stopped by a guard, which is what the recipe asked for."""
    return record.state is RunStatus.DONE or record.exit_code == _GUARD_STOPPED


def set_aside(folder: Path) -> Path:
    """Rename a folder that is in the way, and return its new name. Nothing is deleted. Raises PreflightError."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.aside-{number}")).exists():
        number += 1
    try:
        folder.rename(target)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return target


def is_run(folder: Path) -> bool:
    return (folder / RUN_FILE).is_file()

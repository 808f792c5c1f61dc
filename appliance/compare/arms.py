"""The runs of a comparison: all planned and judged before the first one starts, and what is there of them already."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import yaml

from appliance import hub
from appliance.compare.file import Comparison, run_name
from appliance.errors import GuardStop, PreflightError, RecipeError, refuse_faults
from appliance.finding import Finding, fault
from appliance.launch.resume import Resume, Target, find_misfits, find_start, has_problems_of, original_plan
from appliance.launch.side_job import stop_on_errors
from appliance.plan.build import CACHE_NAME, OriginalPlan, resolve
from appliance.plan.host import HostFacts
from appliance.plan.model_source import hub_name
from appliance.preflight.probes import read_host
from appliance.preflight.report import examine
from appliance.recipe.load import Setting, in_order, is_written, read_recipe
from appliance.recipe.schema import Recipe
from appliance.recipe.text import Node, full_path
from appliance.record.code import code_of
from appliance.record.plan import RunPlan
from appliance.record.session import RunRecord, RunStatus, cannot_write, has_launcher, read_record


@dataclass(frozen=True)
class PlannedRun:
    """A run of a comparison: one arm with one seed."""

    arm: str
    seed: int
    recipe: Recipe
    plan: RunPlan
    findings: tuple[Finding, ...]
    """Findings that preflight let pass."""
    resume: Resume | None = None
    """State from which the run resumes; None: a new run."""

    @property
    def label(self) -> str:
        return f"{self.arm}, seed {self.seed}"

    @property
    def run_dir(self) -> Path:
        return Path(self.plan.run_dir)


def plan_runs(comparison: Comparison, *, date: str | None = None) -> list[PlannedRun]:
    """Plan all runs, seed by seed: after the first seed every arm has one. Raises RecipeError with all problems of all
    arms.  date: the day that prompts are given where no run here has one; None: today.

    The cache is that of the recipe's `cluster.run_dir`, which the comparison's folder lies in: model, data and
    profiles are made once, for all runs and for those of `train`.
    """
    recipes = _recipes(comparison)
    folder = full_path(next(iter(recipes.values())).cluster.run_dir) / comparison.name
    cache_dir = folder.parent / CACHE_NAME
    date = _date_begun(recipes, folder=folder) or date
    judged: dict[str, tuple[HostFacts, tuple[Finding, ...], dict[str, str]]] = {}
    planned = []
    # Once: what it says of `main` or a tag may change between two arms.
    ask_hub, ask_data = functools.cache(hub.revision), functools.cache(hub.data_commit)
    for (arm, seed), recipe in recipes.items():
        run_dir = folder / run_name(arm, seed=seed)
        if arm not in judged:
            name = hub_name(recipe)
            commit = ask_hub(name, requested=recipe.model.revision or "")[0] if name else ""
            data_commit = ask_data(recipe.task.data) if recipe.task.data else ""
            commits = {"commit": commit, "data_commit": data_commit}
            _, host, findings = examine(
                recipe, run_dir=run_dir, ask_hub=True, cache_dir=cache_dir, date=date, **commits
            )
            judged[arm] = (host, tuple(findings), commits)
        host, found, commits = judged[arm]
        plan = resolve(recipe, run_dir=run_dir, host=host, cache_dir=cache_dir, date=date, **commits)
        planned.append(PlannedRun(arm, seed, recipe=recipe, plan=plan, findings=found))
    refuse_faults(dict.fromkeys(finding for _, findings, _ in judged.values() for finding in findings))
    _refuse_other_problems(planned, comparison=comparison)
    return planned


def _date_begun(recipes: Mapping[tuple[str, int], Recipe], *, folder: Path) -> str | None:
    """Return the day that prompts were given when the comparison began, None where none of its runs is there.

    Which prompts are too long may depend on it, and rewards are compared problem by problem: so a run that starts days
    later has the same day as those that are done.
    """
    for (arm, seed), recipe in recipes.items():
        run_dir = folder / run_name(arm, seed=seed)
        try:
            recipe_begun = yaml.safe_load((run_dir / "recipe.yaml").read_text())
            original = _original(run_dir)
        except (
            OSError,
            ValueError,
            yaml.YAMLError,
            RecipeError,
        ):  # no run, or one taken for another
            continue
        if is_written(_as_begun(recipe, original), plain=recipe_begun):
            return original.date
    return None


def _recipes(comparison: Comparison) -> dict[tuple[str, int], Recipe]:
    """Load the recipes by arm and seed, seed by seed."""
    recipes: dict[tuple[str, int], Recipe] = {}
    faults = _several_validations(comparison.recipe)
    for seed in comparison.seeds if not faults else ():
        for arm in comparison.arms:
            own = ((("seed",), seed), (("name",), comparison.name))
            settings = [*arm.settings, *(Setting(path, Node(value, str(comparison.file))) for path, value in own)]
            typed = read_recipe(str(comparison.recipe), settings=settings)
            recipes[arm.name, seed] = typed.recipe
            faults += typed.faults or _not_compared(typed.recipe)
    folders = {recipe.cluster.run_dir for recipe in recipes.values()}
    if len(folders) > 1 and not faults:
        message, hint = "the arms have several", "set it once, in `set`"
        faults.append(fault(("cluster.run_dir",), message, hint, where=str(comparison.file)))
    if faults:
        raise RecipeError(in_order(faults, file=str(comparison.file)))
    return recipes


def _several_validations(file: Path) -> list[Finding]:
    """Return the fault of a recipe with validation sets. It is looked for before `validation` is set, which no recipe
    with some can take."""
    typed = read_recipe(str(file))
    if typed.faults or not typed.recipe.task.val_sets:  # with the settings of the arms it may be whole
        return []
    message = "a comparison validates once, on `validation` problems that all arms share"
    hint = "compare a recipe without them: task.val_file may be the file of one of them"
    return [typed.recipe.placed(fault(("task.val_sets",), message, hint))]


def _not_compared(recipe: Recipe) -> list[Finding]:
    if not recipe.task.tools:
        return []
    message = "in the final validation of a comparison the model speaks once, and calls nothing"
    return [recipe.placed(fault(("task.tools",), message, "compare a recipe without tools"))]


def _refuse_other_problems(planned: list[PlannedRun], *, comparison: Comparison) -> None:
    """Refuse arms with other problems or rewards. Rewards are paired problem by problem, so all arms are validated on
    the same ones, by the same rewards. Raises RecipeError."""
    first, faults = planned[0], list[Finding]()
    for arm, place in ((arm.name, arm.place) for arm in comparison.arms):
        plan = next(run.plan for run in planned if run.arm == arm)
        if _judged(plan) != _judged(first.plan):  # first: the rewards choose problems too, by the truths they read
            hint = f"`task.rewards` must be as in the arm `{first.arm}`"
            faults.append(fault((f"arms.{arm}",), "it is judged by other rewards", hint, where=place))
        elif _validated(plan) != _validated(first.plan):
            hint = f"`task` and the model's tokenizer must be as in the arm `{first.arm}` ({first.plan.task.kind})"
            faults.append(fault((f"arms.{arm}",), "it validates on other problems", hint, where=place))
    refuse_faults(faults)


def _validated(plan: RunPlan) -> tuple[object, ...]:
    return plan.task_files.val_parquet, plan.task.max_response_tokens  # the file's folder: all that makes it


def _judged(plan: RunPlan) -> tuple[object, ...]:
    return plan.task.rewards, plan.task_files.code


class Existing(Enum):
    """States of a run's folder before the comparison starts that run."""

    DONE = "done"
    """The result of this very recipe: a model, or a stop by the guard."""
    NOTHING = "nothing"
    """No folder yet."""
    UNFINISHED = "unfinished"
    """An attempt of this very recipe that did not end well."""
    OTHER = "other"
    """A run of another recipe, or with other problems or other code of the user's, or no run at all."""


def look_at_run(run: PlannedRun) -> Existing:
    """Find out what is there of a run. Raises PreflightError when another program is training it at this moment."""
    folder = run.run_dir
    if not folder.exists():
        return Existing.NOTHING
    try:
        record, recipe = read_record(folder), yaml.safe_load((folder / "recipe.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return Existing.OTHER
    if record.exit_code is None and has_launcher(folder):
        raise PreflightError(f"{folder}: this run is still running", hint="wait for its end, or stop it")
    try:
        original = _original(folder)
        is_of_this_recipe = (
            is_written(_as_begun(run.recipe, original), plain=recipe)
            and (_other_commit(run, original) or has_problems_of(run.plan, run_dir=folder))
            and original.code == {each.copy_name: each.sha256 for each in code_of(run.plan)}
        )
    except RecipeError:  # its plan cannot be read
        return Existing.OTHER
    if not is_of_this_recipe:
        return Existing.OTHER
    return Existing.DONE if has_result(record) else Existing.UNFINISHED


def refuse_other_commit(runs: Iterable[PlannedRun], *, file: Path) -> None:
    """Refuse runs that began with another commit of a model on the hub: rewards are compared, so all runs must train
    one commit. Raises PreflightError whose hint says how to continue.  runs: that are there already.  file: of the
    comparison."""
    for run in runs:
        if began_with := _other_commit(run, _original(run.run_dir)):
            weights, revision = run.plan.weights, run.plan.model.revision or "main"
            message = f"{run.label}: {weights.hub_name}: {revision} is {weights.commit} on the hub now, "
            hint = f"to continue with those runs: model.revision: {began_with} in {file}, under `set` or in the arm"
            raise PreflightError(f"{message}the run began with {began_with}", hint=hint)


def _original(run_dir: Path) -> OriginalPlan:
    """Return what the run that is there began with. Raises RecipeError when its plan cannot be read."""
    original = original_plan(Target(run_dir, RunRecord()), alone=True)
    assert original is not None, "the record is one of a run that has begun"
    return original


def _other_commit(run: PlannedRun, original: OriginalPlan) -> str:
    """Return the commit that the run began with, where the same revision is another commit now. Empty where it is the
    same, or not known, as with an offline hub."""
    weights = run.plan.weights
    if original.model != weights.hub_name or not weights.commit or original.commit == weights.commit:
        return ""
    return original.commit


def _as_begun(recipe: Recipe, original: OriginalPlan) -> Recipe:
    """Return the recipe as the run has it: where it names the very commit that the run began with, the run may have
    named a tag or nothing."""
    model = recipe.model
    if model.revision and original.commit == model.revision:
        model = model.model_copy(update={"revision": original.revision or None})
    return recipe.model_copy(update={"model": model})


def has_result(record: RunRecord) -> bool:
    """Tell whether a run has a result: it is done, or a guard stopped it, which is what the recipe asked for."""
    return record.state is RunStatus.DONE or record.exit_code == GuardStop.exit_code


def resumed_run(run: PlannedRun) -> PlannedRun | None:
    """Plan a run from its newest whole checkpoint; None where it has none. Raises as find_start and
    stop_on_errors do."""
    target = Target(run.run_dir, read_record(run.run_dir))
    start = find_start(target)
    newest = start.search.newest
    if newest is None:
        return None
    host = read_host(run.run_dir.parent)
    plan = resolve(
        run.recipe,
        run_dir=run.run_dir,
        host=host,
        cache_dir=Path(run.plan.cache_dir),
        resume_from=newest,
        original=original_plan(target, alone=True),
        commit=run.plan.weights.commit,
    )
    misfits = map(run.recipe.placed, find_misfits(start, plan=plan))
    stop_on_errors([replace(finding, message=f"{run.label}: {finding.message}") for finding in misfits])
    return replace(run, plan=plan, resume=start)


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

"""The runs of a comparison: every recipe resolved and judged before the first one starts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from appliance import hub
from appliance.compare.file import Arm, Comparison, in_order, run_name
from appliance.errors import RecipeError
from appliance.launch.resume import Resume, Target, find_start, original_plan, refuse_misfit
from appliance.plan.build import CACHE_NAME, build_plan, hub_name
from appliance.plan.host import HostFacts
from appliance.preflight.finding import Finding
from appliance.preflight.probes import read_host
from appliance.preflight.report import examine
from appliance.recipe.load import Setting, load_recipe
from appliance.recipe.schema import Recipe
from appliance.recipe.text import Node, Problem, full_path
from appliance.record.plan import RunPlan
from appliance.record.session import read_record


@dataclass(frozen=True)
class PlannedRun:
    """One arm with one seed. findings: what preflight let pass, of the arm.  resume: where it goes on, None: new."""

    arm: str
    seed: int
    recipe: Recipe
    plan: RunPlan
    findings: tuple[Finding, ...]
    resume: Resume | None = None

    @property
    def label(self) -> str:
        return f"{self.arm}, seed {self.seed}"

    @property
    def run_dir(self) -> Path:
        return Path(self.plan.run_dir)


def plan_runs(comparison: Comparison) -> list[PlannedRun]:
    """All runs, seed by seed: after the first seed every arm has one. Raises RecipeError with all problems of all arms.

    The cache is that of the recipe's `cluster.run_dir`, which the comparison's folder lies in: model, data and
    profiles are made once, for all runs and for those of `train`.
    """
    recipes = _recipes(comparison)
    folder = comparison_folder(recipes, comparison=comparison)
    cache_dir = folder.parent / CACHE_NAME
    judged: dict[str, tuple[HostFacts, tuple[Finding, ...], str]] = {}
    planned: list[PlannedRun] = []
    ask_hub = functools.cache(hub.revision)  # once: what it says of `main` or a tag may change between two arms
    for (arm, seed), recipe in recipes.items():
        run_dir = folder / run_name(arm, seed=seed)
        if arm not in judged:
            commit = _commit(recipe, ask_hub=ask_hub)
            _, host, findings = examine(recipe, run_dir=run_dir, ask_hub=True, cache_dir=cache_dir, commit=commit)
            judged[arm] = (host, tuple(findings), commit)
        host, found, commit = judged[arm]
        plan = build_plan(recipe, run_dir=run_dir, host=host, cache_dir=cache_dir, commit=commit)
        planned.append(PlannedRun(arm, seed, recipe=recipe, plan=plan, findings=found))
    _refuse_other_problems(planned, comparison=comparison)
    return planned


def _commit(recipe: Recipe, *, ask_hub: Callable[..., tuple[str, str]]) -> str:
    """Of the recipe's model on the hub, empty where it has none or nobody knows. ask_hub: as hub.revision."""
    name = hub_name(recipe)
    return ask_hub(name, of=recipe.model.revision or "")[0] if name else ""


def go_on(run: PlannedRun) -> PlannedRun | None:
    """The run from its newest whole checkpoint, or None where it has none. Raises as find_start and refuse_misfit."""
    target = Target(run.run_dir, read_record(run.run_dir))
    start = find_start(target)
    newest = start.found.newest
    if newest is None:
        return None
    host = read_host(run.run_dir.parent)
    plan = build_plan(
        run.recipe,
        run_dir=run.run_dir,
        host=host,
        cache_dir=Path(run.plan.cache_dir),
        resume_from=newest,
        original=original_plan(target),
        commit=run.plan.model.commit,
    )
    refuse_misfit(start, plan=plan)
    return replace(run, plan=plan, resume=start)


def comparison_folder(recipes: dict[tuple[str, int], Recipe], *, comparison: Comparison) -> Path:
    first = next(iter(recipes.values()))
    return full_path(first.cluster.run_dir) / comparison.name


def _recipes(comparison: Comparison) -> dict[tuple[str, int], Recipe]:
    """By arm and seed, seed by seed."""
    recipes: dict[tuple[str, int], Recipe] = {}
    problems: list[Problem] = []
    for seed in comparison.seeds:
        for arm in comparison.arms:
            try:
                recipes[arm.name, seed] = load_recipe(
                    str(comparison.recipe), settings=_of_run(arm, comparison=comparison, seed=seed)
                )
            except RecipeError as error:
                problems += error.problems
    folders = {recipe.cluster.run_dir for recipe in recipes.values()}
    if len(folders) > 1:
        problems.append((f"{comparison.file}: cluster.run_dir: the arms have several", "set it once, in `set`"))
    if problems:
        raise RecipeError(in_order(problems, file=str(comparison.file)))
    return recipes


def _of_run(arm: Arm, *, comparison: Comparison, seed: int) -> Iterator[Setting]:
    yield from arm.settings
    yield Setting(("seed",), Node(seed, str(comparison.file)))
    yield Setting(("name",), Node(comparison.name, str(comparison.file)))


def _refuse_other_problems(planned: list[PlannedRun], *, comparison: Comparison) -> None:
    """Rewards are paired problem by problem, so all arms are validated on the same ones. Raises RecipeError."""
    first = planned[0].plan.task
    others = {run.arm: run for run in planned if _problems(run.plan) != _problems(planned[0].plan)}
    if others:
        place = {arm.name: arm.place for arm in comparison.arms}
        hint = f"`task` and the model's tokenizer must be as in the arm `{planned[0].arm}` ({first.kind})"
        raise RecipeError([(f"{place[arm]}: arms.{arm}: it validates on other problems", hint) for arm in others])


def _problems(plan: RunPlan) -> tuple[object, ...]:
    return (plan.task.val_parquet, plan.task.max_response_tokens)  # the file's folder is named by all that makes it

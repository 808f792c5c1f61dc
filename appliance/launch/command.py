"""The commands `train`, `plan` and `check`: what a recipe means on this host, and the training of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from appliance import console
from appliance.errors import PreflightError, RecipeError
from appliance.launch.workspace import raise_on_errors, stop_on_errors
from appliance.preflight.finding import Finding, has_error
from appliance.preflight.report import as_json, examine, lines, plan_as
from appliance.recipe.load import to_yaml
from appliance.recipe.schema import NAME_PATTERN, Recipe
from appliance.recipe.text import full_path
from appliance.record.plan import RunPlan
from appliance.record.session import cannot_write, free_run_dir

if TYPE_CHECKING:
    from appliance.launch.train import Step


def run_train(
    recipe: Recipe,
    *,
    name: str | None,
    resume: str,
    force: bool,
    dry_run: bool,
    json_mode: bool,
    steps: tuple[Step, ...],
) -> int:
    """resume: `never`, `auto` or a path.  steps: of the run, before its training. Raises the error that ends it."""
    from appliance.launch.attempts import most_restarts, resume_training, through_faults
    from appliance.launch.train import run_training

    if resume != "never":
        code = resume_training(
            recipe, resume=resume, name=name, force=force, dry_run=dry_run, json_mode=json_mode, steps=steps
        )
        if code is not None:
            return code
    plan, _, findings = examine(recipe, run_dir=new_run_dir(recipe, name=name), ask_hub=True)
    if dry_run:
        print_plan(plan, recipe=recipe, findings=findings, json_mode=json_mode)
        raise_on_errors(findings)
        return 0
    stop_on_errors(findings)
    code = run_training(
        plan,
        recipe_yaml=to_yaml(recipe),
        findings=findings,
        name=name,
        json_mode=json_mode,
        steps=steps,
        may_restart=most_restarts(recipe) > 0,
    )
    return through_faults(code, recipe, Path(plan.run_dir), json_mode=json_mode, steps=steps)


def run_plan(recipe: Recipe, *, name: str | None, full: bool, json_mode: bool) -> None:
    """Print what would happen, on the hardware that the recipe names."""
    try:
        run_dir = new_run_dir(recipe, name=name)
    except PreflightError as error:  # of this host, and the plan may be for another one
        console.say(f"warning: cluster.run_dir: {error.message}")
        run_dir = full_path(recipe.cluster.run_dir) / (name or f"{recipe.name}-1")
    plan, _, findings = examine(recipe, run_dir=run_dir, ask_hub=False)
    print_plan(plan, recipe=recipe, findings=findings, json_mode=json_mode, full=full)


def run_check(recipe: Recipe, *, typed: str, json_mode: bool) -> None:
    """Judge this host. typed: the recipe as the user named it. Raises PreflightError when it cannot."""
    findings = examine(recipe, run_dir=new_run_dir(recipe, name=None), ask_hub=True)[2]
    if json_mode:
        console.out(json.dumps({"schema_version": 1, "findings": as_json(findings)}, indent=2))
    else:
        its = "it" if recipe.cluster.nodes == 1 else "its part; other hosts are judged when they join a training"
        can = [] if has_error(findings) else [f"{typed}: this host can run {its}"]
        console.show("\n".join([*lines(findings), *can]))
    raise_on_errors(findings)


def print_plan(plan: RunPlan, *, recipe: Recipe, findings: list[Finding], json_mode: bool, full: bool = False) -> None:
    """On stdout, the findings with it."""
    text = plan_as(plan, recipe=recipe, findings=findings, json_mode=json_mode, full=full, columns=console.columns())
    (console.out if json_mode else console.show)(text)


def new_run_dir(recipe: Recipe, *, name: str | None) -> Path:
    """Absolute; nothing is there yet. name: of the command line, one path component; else the recipe's and a number.

    Raises RecipeError for a name that is none or is in use, PreflightError for a folder that cannot be written.
    """
    root = full_path(recipe.cluster.run_dir)
    if name is not None and not NAME_PATTERN.fullmatch(name):
        hint = "use letters, digits, `.`, `_` and `-`, at most 80, no space or slash"
        raise RecipeError([(f"--name: the text `{name}` is not a name", hint)])
    try:
        run_dir = free_run_dir(root, name=recipe.name) if name is None else root / name
        is_in_use = name is not None and run_dir.exists()
    except OSError as error:
        raise cannot_write(root, error) from error
    if is_in_use:
        raise RecipeError([(f"--name: `{name}` is in use: {run_dir}", "choose another one, or leave it out")])
    return run_dir

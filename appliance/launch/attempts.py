"""`train --resume`, and what follows a fault: from the choice of a run to its next attempt."""

from __future__ import annotations

from pathlib import Path

from appliance import console
from appliance.launch import resume as resuming
from appliance.launch.restarts import keep_going
from appliance.launch.train import Step, run_training
from appliance.launch.workspace import raise_on_errors, stop_on_errors
from appliance.plan.derive import steps_of
from appliance.preflight.report import examine, plan_as
from appliance.recipe.load import to_yaml
from appliance.recipe.schema import Recipe
from appliance.recipe.text import full_path
from appliance.record.checkpoints import CheckpointSearch, newest_step
from appliance.report.write import LivePage
from appliance.signals import told_interruptions


def resume_training(
    recipe: Recipe,
    *,
    resume: str,
    name: str | None,
    force: bool,
    dry_run: bool,
    json_mode: bool,
    steps: tuple[Step, ...],
) -> int | None:
    """Go on with the run that is meant; its exit code, or None when a new run is to be started.

    resume: `auto`, `never` or a path.  Raises as the functions of launch/resume.py do.
    """
    root = full_path(recipe.cluster.run_dir)
    target = resuming.find_target(resume, root=root, recipe_name=recipe.name, name=name)
    if target is None:
        return None
    with told_interruptions(lambda: newest_step(target.run_dir)):
        code = _attempt(recipe, target, name=name, force=force, dry_run=dry_run, json_mode=json_mode, steps=steps)
    return code if dry_run else through_faults(code, recipe, target.run_dir, json_mode=json_mode, steps=steps)


def through_faults(code: int, recipe: Recipe, run_dir: Path, *, json_mode: bool, steps: tuple[Step, ...]) -> int:
    """What is left of a run after its first attempt ended with this code. Returns the last exit code."""

    def again(found: CheckpointSearch) -> int:
        target = resuming.find_target(str(run_dir), root=run_dir.parent, recipe_name=recipe.name, name=run_dir.name)
        assert target is not None, "a run's own folder is a target"
        return _attempt(
            recipe,
            target,
            name=run_dir.name,
            force=True,
            dry_run=False,
            json_mode=json_mode,
            steps=steps,
            found=found,
        )

    restarts = most_restarts(recipe)
    try:
        with told_interruptions(lambda: newest_step(run_dir)):
            return keep_going(code, run_dir=run_dir, max_restarts=restarts, again=again)
    finally:
        if code and restarts:  # the page of the last attempt may still wait for another one
            LivePage(run_dir).write()


def most_restarts(recipe: Recipe) -> int:
    """How many attempts may follow the first one by themselves."""
    cluster = recipe.cluster
    has_nodes_of_its_own = cluster.nodes > 1 and cluster.address is None  # they left with the head of this attempt
    return 0 if has_nodes_of_its_own else recipe.trainer.max_restarts


def _attempt(
    recipe: Recipe,
    target: resuming.Target,
    *,
    name: str | None,
    force: bool,
    dry_run: bool,
    json_mode: bool,
    steps: tuple[Step, ...],
    found: CheckpointSearch | None = None,
) -> int:
    """found: a look at the run's checkpoints, None: it is still to be made."""
    resuming.refuse_changes(recipe, target=target, force=force)
    if resuming.is_done(target, steps=steps_of(recipe)[0]):
        console.say(f"the run {target.run_dir.name} is done: {target.run_dir / 'model'}")
        return 0
    start = resuming.find_start(target) if found is None else resuming.Resume(target, found)
    for line in resuming.rejected_texts(start.found.rejected):
        console.say(f"warning: {line}")
    plan, _, findings = examine(
        recipe,
        run_dir=target.run_dir,
        ask_hub=True,
        cache_dir=resuming.cache_of(target),
        resume_from=start.found.newest,
        original=resuming.original_plan(target),
    )
    resuming.refuse_misfit(start, plan=plan)
    if dry_run:
        console.say(_words(start))
        write = console.out if json_mode else console.show
        write(plan_as(plan, recipe=recipe, findings=findings, json_mode=json_mode))
        raise_on_errors(findings)
        return 0
    stop_on_errors(findings)
    console.say(_words(start))
    return run_training(
        plan,
        recipe_yaml=to_yaml(recipe),
        findings=findings,
        name=name,
        json_mode=json_mode,
        steps=steps,
        resume=start,
        may_restart=most_restarts(recipe) > 0,
    )


def _words(start: resuming.Resume) -> str:
    name = start.target.run_dir.name
    if start.found.newest is None:
        return f"the run {name} has no whole checkpoint: it starts from the beginning"
    return f"the run {name} goes on after step {start.step}"

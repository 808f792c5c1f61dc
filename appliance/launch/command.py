"""The commands `train`, `plan` and `check`: what a recipe means on this host, its training, and each further attempt;
and `export`, what came of it.

A new attempt follows a fault: a process that died, an engine that hung, an update that did not arrive. Only from a
checkpoint that verifies, and only while attempts get further: a training that fails twice at the same step would fail
there for ever. What a guard stopped, what the recipe or the host is to blame for, and a patch that does not fit are no
faults of this kind. Nor is a fault beside a signal: who stops a service may send it to all of its processes.
"""

from __future__ import annotations

import contextlib
import json
import os.path
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance import console
from appliance.errors import PreflightError, RecipeError, refuse_faults
from appliance.files import partial_prefix
from appliance.finding import Finding, fault, has_error
from appliance.launch import resume as resuming
from appliance.launch.side_job import folder_elsewhere, new_folder, raise_on_errors, run_child, stop_on_errors
from appliance.launch.train import Stage, run_training
from appliance.plan.derive import steps_of
from appliance.preflight.report import examine, finding_lines, findings_as_json, load_judged, print_plan
from appliance.recipe.load import to_yaml
from appliance.recipe.schema import NAME_PATTERN, Recipe
from appliance.recipe.text import full_path
from appliance.record.checkpoints import (
    ADAPTER_FOLDER,
    CheckpointSearch,
    checkpoint_folder,
    damage,
    find_newest,
    in_order,
    newest_step,
    step_of,
)
from appliance.record.events import may_restart
from appliance.record.plan import RunPlan
from appliance.record.session import asked_to_stop, cannot_write, free_run_dir, let_go
from appliance.report.folder import find_run, reading
from appliance.report.page import LivePage
from appliance.signals import report_interruptions

EXPORT_MODULE, ADAPTER_ONLY = "appliance.trainer.export", "adapter"


def run_train(
    recipe: Recipe,
    *,
    name: str | None,
    resume: str,
    force: bool,
    dry_run: bool,
    json_mode: bool,
    stages: tuple[Stage, ...],
) -> int:
    """Train a recipe, or resume its run, and return the exit code. resume: `never`, `auto` or a path.  stages: what
    the run does before its training. Raises the error that ends it."""
    root = full_path(recipe.cluster.run_dir)
    target = resuming.find_target(resume, root=root, recipe_name=recipe.name, name=name)
    attempts = Attempts(recipe, stages, json_mode=json_mode, dry_run=dry_run)
    if target is None:
        run_dir = new_run_dir(recipe, name=name)
        plan, _, findings = examine(recipe, run_dir=run_dir, ask_hub=True)
        code = attempts.begin(plan, findings, name=name)
    else:
        run_dir = target.run_dir
        with report_interruptions(lambda: newest_step(run_dir)):
            code = attempts.resume(target, force=force)
    return code if dry_run else attempts.through_faults(code, run_dir)


@dataclass(frozen=True)
class Attempts:
    """The attempts of one run, with the options that `train` was given."""

    recipe: Recipe
    stages: tuple[Stage, ...] = ()
    json_mode: bool = False
    dry_run: bool = False
    """Whether only the plan is printed."""

    @property
    def most_restarts(self) -> int:
        """Attempts that may follow the first one without a user's command."""
        cluster = self.recipe.cluster
        has_nodes_of_its_own = cluster.nodes > 1 and cluster.address is None  # they left with the head of this attempt
        return 0 if has_nodes_of_its_own else self.recipe.trainer.max_restarts

    def begin(
        self, plan: RunPlan, findings: list[Finding], *, name: str | None, resume: resuming.Resume | None = None
    ) -> int:
        """Begin an attempt, or print its plan. name: as for run_training.  resume: the run to continue, None for a new
        one."""
        refuse_faults(findings)
        if not self.dry_run:
            stop_on_errors(findings)
        if resume is not None:
            has_none = "has no whole checkpoint: it starts from the beginning"
            console.say(f"the run {name} {f'resumes after step {resume.step}' if resume.search.newest else has_none}")
        if self.dry_run:
            print_plan(plan, recipe=self.recipe, findings=findings, json_mode=self.json_mode)
            raise_on_errors(findings)
            return 0
        return run_training(
            plan,
            recipe_yaml=to_yaml(self.recipe),
            findings=findings,
            name=name,
            json_mode=self.json_mode,
            stages=self.stages,
            resume=resume,
            may_restart=self.most_restarts > 0,
        )

    def resume(self, target: resuming.Target, *, force: bool, restart: resuming.Resume | None = None) -> int:
        """Resume a run, and return the exit code. restart: the state to restart from after a fault; None: the
        checkpoints are still to be checked."""
        resuming.refuse_changes(self.recipe, target=target, force=force)
        if resuming.is_done(target, steps=steps_of(self.recipe)[0]):
            console.say(f"the run {target.run_dir.name} is done: {target.run_dir / 'model'}")
            return 0
        start = restart or resuming.find_start(target)
        resuming.warn_of_rejected(start.search)
        plan, _, findings = examine(
            self.recipe,
            run_dir=target.run_dir,
            ask_hub=True,
            cache_dir=resuming.cache_of(target),
            resume_from=start.search.newest,
            original=resuming.original_plan(target, alone=restart is not None),
        )
        misfits = map(self.recipe.placed, resuming.find_misfits(start, plan=plan))
        return self.begin(plan, [*findings, *misfits], name=target.run_dir.name, resume=start)

    def through_faults(self, code: int, run_dir: Path) -> int:
        """Make further attempts after one that ended with this code, where faults allow it. Returns the last exit
        code."""

        def again(search: CheckpointSearch, restart: str) -> int:
            target = resuming.find_target(str(run_dir), root=run_dir.parent, recipe_name=self.recipe.name, name=None)
            assert target is not None, "a run's own folder is a target"
            return self.resume(target, force=True, restart=resuming.Resume(target, search, restart=restart))

        restarts = self.most_restarts
        try:
            with report_interruptions(lambda: newest_step(run_dir)):
                return keep_going(code, run_dir=run_dir, max_restarts=restarts, again=again)
        finally:
            let_go(run_dir)
            if code and restarts:  # the page of the last attempt may still wait for another one
                LivePage(run_dir).write()


def keep_going(code: int, *, run_dir: Path, max_restarts: int, again: Callable[[CheckpointSearch, str], int]) -> int:
    """Start the run again after faults. Returns the last exit code.

    code: of the first attempt.  again: function that resumes the run from the checkpoints that were found, every byte
    of which was read just now, and returns the exit code; its second argument is `restart` of Resume.
    """
    reached = -1
    for number in range(1, max_restarts + 1):
        if not may_restart(run_dir, code=code):
            return code
        if signal := asked_to_stop(run_dir):
            console.say(f"not restarted: stopped by {signal}")
            return code
        search = find_newest(run_dir)
        step = -1 if search.newest is None else step_of(search.newest) or 0
        if step <= reached:
            why = (
                f"two attempts in a row got no further than step {step}"
                if search.newest
                else "there is no whole checkpoint"
            )
            console.say(f"not restarted: {why}")
            return code
        reached = step
        restart = f"restart {number} of {max_restarts}, from the state after step {step}"
        console.say(restart)
        code = again(search, restart)
    return code


FindProfile = Callable[[RunPlan], Path | None]  # of an earlier run, for the same plan


def run_plan(
    recipe: Recipe, *, name: str | None, full: bool, json_mode: bool, find_profile: FindProfile = lambda plan: None
) -> None:
    """Print what would happen, on the hardware that the recipe names."""
    try:
        run_dir = new_run_dir(recipe, name=name)
    except PreflightError as error:  # of this host, and the plan may be for another one
        console.say(f"warning: cluster.run_dir: {error.message}")
        run_dir = full_path(recipe.cluster.run_dir) / (name or f"{recipe.name}-1")
    plan, _, findings = examine(recipe, run_dir=run_dir, ask_hub=False, find_profile=find_profile)
    refuse_faults([finding for finding in findings if finding.is_fault])
    print_plan(plan, recipe=recipe, findings=findings, json_mode=json_mode, full=full)


def run_check(
    name_or_path: str, *, sets: Iterable[str] = (), json_mode: bool, find_profile: FindProfile = lambda plan: None
) -> None:
    """Judge a recipe on this host. name_or_path, sets: as of load_judged. Raises RecipeError with all errors when the
    recipe has a fault, and PreflightError when the host cannot run it."""
    try:
        recipe = load_judged(name_or_path, sets=sets)
    except RecipeError as error:
        if json_mode:
            _print_findings(error.findings)
        raise
    run_dir = new_run_dir(recipe, name=None)
    findings = examine(recipe, run_dir=run_dir, ask_hub=True, find_profile=find_profile)[2]
    if json_mode:
        _print_findings(findings)
    refuse_faults(findings)
    if not json_mode:
        its = "it" if recipe.cluster.nodes == 1 else "its part; other hosts are judged when they join a training"
        can = [] if has_error(findings) else [f"{name_or_path}: this host can run {its}"]
        console.show("\n".join([*finding_lines(findings), *can]))
    raise_on_errors(findings)


def _print_findings(findings: Sequence[Finding]) -> None:
    console.out(json.dumps({"schema_version": 1, "findings": findings_as_json(findings)}, indent=2))


def new_run_dir(recipe: Recipe, *, name: str | None) -> Path:
    """Return the folder of a new run: absolute, nothing is there yet. name: of the command line, one path component;
    else the recipe's and a number. Raises RecipeError for a name that is none or is in use, PreflightError for a
    folder that cannot be written."""
    root = full_path(recipe.cluster.run_dir)
    if name is not None and not NAME_PATTERN.fullmatch(name):
        hint = "use letters, digits, `.`, `_` and `-`, at most 80, no space or slash"
        raise RecipeError([fault(("--name",), f"the text `{name}` is not a name", hint)])
    try:
        run_dir = free_run_dir(root, name=recipe.name) if name is None else root / name
        is_in_use = name is not None and run_dir.exists()
    except OSError as error:
        raise cannot_write(root, error) from error
    if is_in_use:
        raise RecipeError([fault(("--name",), f"`{name}` is in use: {run_dir}", "choose another one, or leave it out")])
    return run_dir


def run_export(run: str, *, run_root: Path, step: int | None, output: Path, adapter: bool = False) -> int:
    """Write the trained model of a checkpoint as a folder that plain transformers and plain vLLM load: `output`, which
    must not be there. step: of the checkpoint, None for the newest whole one. adapter: LoRA's alone.

    Raises RecipeError for a run, a step or an adapter that is not there, PreflightError for a damaged checkpoint or an
    output that cannot be written.
    """
    run_dir, target = find_run(run, run_root=run_root), full_path(str(output))
    if os.path.lexists(target):
        hint = "name a new folder, or remove what is there"
        raise RecipeError([fault(("-o",), f"{target} is there already and is not overwritten", hint)])
    with reading(run_dir):
        checkpoint = _checkpoint_to_export(run_dir, step=step)
        if adapter and not (checkpoint / "actor" / ADAPTER_FOLDER).is_dir():
            hint = "leave --adapter out: its checkpoints have the whole model"
            raise RecipeError([fault(("--adapter",), f"{run_dir} trained no adapter (model.lora)", hint)])
    with new_folder(target.parent, option="-o"), _nothing_half_made(target):
        try:
            with folder_elsewhere(command="export") as folder:
                run_child(
                    [EXPORT_MODULE, *map(str, (run_dir, checkpoint, target, folder)), *([ADAPTER_ONLY] * adapter)],
                    command="export",
                    folder=folder,
                    env={},
                )
        except OSError as error:  # the child reports what concerns the target
            raise cannot_write(Path(tempfile.gettempdir()), error, setting="TMPDIR") from error
    console.say(f"the {'adapter' if adapter else 'model'} of {checkpoint.name} is in {target}")
    console.out(str(target))
    return 0


@contextlib.contextmanager
def _nothing_half_made(target: Path) -> Iterator[None]:
    """Remove what a child that a signal ended has half made: as large as a model, hidden, in the user's folder."""
    half = re.compile(re.escape(partial_prefix(target)) + r"[a-z0-9_]{8}")  # as mkdtemp names it
    before, whole = set(target.parent.iterdir()), False
    try:
        yield
        whole = True
    finally:
        for each in () if whole else set(target.parent.iterdir()) - before:
            if half.fullmatch(each.name):
                shutil.rmtree(each, ignore_errors=True)


def _checkpoint_to_export(run_dir: Path, *, step: int | None) -> Path:
    if step is None:
        search = find_newest(run_dir)
        resuming.warn_of_rejected(search)
        if search.newest is None:
            raise RecipeError(
                [
                    fault(
                        (str(run_dir),),
                        "it has no whole checkpoint",
                        "its events.jsonl says what was saved, and what was set aside and why",
                    )
                ]
            )
        return search.newest
    folder = checkpoint_folder(run_dir, step=step)
    if not folder.is_dir():
        there = ", ".join(each.name.rpartition("_")[2] for each in in_order(run_dir)) or "none"
        raise RecipeError(
            [
                fault(
                    (f"--step {step}",),
                    f"{run_dir} has no checkpoint of that step",
                    f"steps with a checkpoint: {there}",
                )
            ]
        )
    problems = damage(folder)
    if problems:
        raise PreflightError(f"{folder} is damaged: {problems[0]}", hint="leave --step out for the newest whole one")
    return folder

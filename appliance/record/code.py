"""The user's Python files in the run's folder: what its processes execute is what was planned, in every attempt."""

from __future__ import annotations

import hashlib
from pathlib import Path

from appliance.errors import AttestationError, RecipeError
from appliance.files import digest_of, write_whole
from appliance.record.plan import CODE_FOLDER, CodeFile, OwnPlan, RunPlan, TaskPlan


def code_of(plan: RunPlan) -> tuple[CodeFile, ...]:
    return plan.task.own.code if plan.task.own is not None else ()


def copy_of(each: CodeFile, *, run_dir: str) -> Path:
    return Path(run_dir) / CODE_FOLDER / each.copy_name


def user_folder(file: str, *, own: OwnPlan) -> str:
    """The folder that a file of the user's lies in, or the file that one is the run's copy of."""
    folders = {name: str(Path(each.path).parent) for each in own.code for name in (each.path, each.copy_name)}
    return folders[file if file in folders else Path(file).name]


def copy_code(plan: RunPlan, *, logs: Path | None = None) -> None:
    """A copy that is as the plan has it stays. Raises RecipeError for files that are not, OSError for the folder. logs:
    of the attempt before, which keep what it ran and this one replaces."""
    made, changed = {}, []
    for each in code_of(plan):
        copy = copy_of(each, run_dir=plan.run_dir)
        if each.sha256 and digest_of(copy) == each.sha256:
            continue
        content = Path(each.path).read_bytes() if digest_of(Path(each.path)) else b""
        if hashlib.sha256(content).hexdigest() != each.sha256:
            fact, hint = "it is not the file that was planned, it changed since", "start again"
            if copy.exists():
                fact, hint = f"{fact}, and so did the run's copy {copy}", "put one of them back, or start a new run"
            changed.append((f"{each.path}: {fact}", hint))
            continue
        made[copy] = content
    if changed:
        raise RecipeError(changed)
    for copy, content in made.items():
        copy.parent.mkdir(exist_ok=True)
        if logs is not None and copy.exists() and not (kept := logs / CODE_FOLDER / copy.name).exists():
            kept.parent.mkdir(exist_ok=True)
            write_whole(kept, copy.read_bytes())
        write_whole(copy, content)


def changed_code(plan: RunPlan) -> list[CodeFile]:
    """Those that are not what was planned: a run that has the copies goes on with them."""
    return [each for each in code_of(plan) if digest_of(Path(each.path)) != each.sha256]


def as_it_runs(plan: RunPlan) -> TaskPlan:
    """The task with the run's copies in place of the user's files, where the run has what was planned."""
    own = plan.task.own
    if own is None or not all(e.sha256 and digest_of(copy_of(e, run_dir=plan.run_dir)) == e.sha256 for e in own.code):
        return plan.task
    return plan.task.replace(own=own.with_copies(plan.run_dir))


def attested_code(plan: RunPlan) -> dict[str, str]:
    """SHA-256 of each copy, by the user's path. Raises AttestationError where one is not what the plan has."""
    found = {each.path: digest_of(copy_of(each, run_dir=plan.run_dir)) for each in code_of(plan)}
    if other := [each for each in code_of(plan) if found[each.path] != each.sha256]:
        copy = copy_of(other[0], run_dir=plan.run_dir)
        raise AttestationError(f"{copy} is not the file that was planned", hint="resume the run, which copies it again")
    return found

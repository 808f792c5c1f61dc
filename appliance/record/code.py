"""The user's Python files in the run's folder: what its processes execute is what was planned, in every attempt."""

from __future__ import annotations

import hashlib
from pathlib import Path

from appliance.errors import AttestationError, RecipeError
from appliance.files import digest_of, write_whole
from appliance.finding import fault
from appliance.record.plan import CODE_FOLDER, CodeFile, RunPlan
from appliance.settings.sections import Task


def code_of(plan: RunPlan) -> tuple[CodeFile, ...]:
    """List the Python files of the user that a plan names."""
    return plan.task_files.code


def copy_of(file: CodeFile, *, run_dir: str) -> Path:
    """Return the place of the run's copy of a file."""
    return Path(run_dir) / CODE_FOLDER / file.copy_name


def _digest_of_copy(file: CodeFile, plan: RunPlan) -> str:
    return digest_of(copy_of(file, run_dir=plan.run_dir))


def copy_code(plan: RunPlan, *, logs: Path | None = None) -> None:
    """Copy the user's files into the run's folder; a copy that is what was planned stays. Raises RecipeError for files
    that are not, OSError for the folder. logs: of the attempt before, which keep what it ran and this one replaces."""
    contents, changed = {}, []
    for file in code_of(plan):
        copy = copy_of(file, run_dir=plan.run_dir)
        if file.sha256 and digest_of(copy) == file.sha256:
            continue
        content = Path(file.path).read_bytes() if digest_of(Path(file.path)) else b""
        if hashlib.sha256(content).hexdigest() != file.sha256:
            fact, hint = "it is not the file that was planned: it has changed since", "start again"
            if copy.exists():
                fact, hint = f"{fact}, and so did the run's copy {copy}", "put one of them back, or start a new run"
            changed.append(fault((file.path,), fact, hint))
            continue
        contents[copy] = content
    if changed:
        raise RecipeError(changed)
    for copy, content in contents.items():
        copy.parent.mkdir(exist_ok=True)
        if logs is not None and copy.exists() and not (in_logs := logs / CODE_FOLDER / copy.name).exists():
            in_logs.parent.mkdir(exist_ok=True)
            write_whole(in_logs, copy.read_bytes())
        write_whole(copy, content)


def changed_code(plan: RunPlan) -> list[CodeFile]:
    """List the user's files that are not what was planned: a run that has the copies continues with them."""
    return [file for file in code_of(plan) if digest_of(Path(file.path)) != file.sha256]


def with_copies(plan: RunPlan) -> Task:
    """Return the task with the run's copies in place of the user's files: what a run executes."""
    copies = {file.path: str(copy_of(file, run_dir=plan.run_dir)) for file in code_of(plan)}
    rewards = tuple(
        reward.replace(name=f"{copies[reward.file]}:{reward.function}") if reward.file else reward
        for reward in plan.task.rewards
    )
    return plan.task.replace(rewards=rewards, tools=copies.get(plan.task.tools or ""))


def as_it_runs(plan: RunPlan) -> Task:
    """Return the task with the run's copies in place of the user's files, where the run has what was planned."""
    has_copies = all(file.sha256 and _digest_of_copy(file, plan) == file.sha256 for file in code_of(plan))
    return with_copies(plan) if has_copies else plan.task


def attested_code(plan: RunPlan) -> dict[str, str]:
    """Return the SHA-256 of each copy, by the user's path. Raises AttestationError where one is not what was
    planned."""
    digests = {file.path: _digest_of_copy(file, plan) for file in code_of(plan)}
    if wrong := [file for file in code_of(plan) if digests[file.path] != file.sha256]:
        copy = copy_of(wrong[0], run_dir=plan.run_dir)
        raise AttestationError(f"{copy} is not the file that was planned", hint="resume the run, which copies it again")
    return digests

"""A command that is no training: a folder for its work, preflight about what it needs, and one child, such as a
benchmark or a check of an engine, whose output goes to a log and whose end is ours.

What `bench`, `verify` and `profile` share is here. Their jobs and children differ: in `bench` several engines take
turns in one child, `verify` starts a child for each engine, and `profile` streams a model's layers without an engine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from appliance import console
from appliance.errors import ApplianceError, EngineError, PreflightError, error_class, refuse_faults
from appliance.files import is_full
from appliance.finding import Finding, Severity, finding_lines
from appliance.plan.host import HostFacts
from appliance.preflight.checks import judge
from appliance.preflight.inputs import read_inputs
from appliance.processes import module_argv
from appliance.recipe.schema import Recipe
from appliance.recipe.text import full_path
from appliance.record.events import first_failure
from appliance.record.plan import RunPlan
from appliance.record.session import cannot_write
from appliance.tasks.prepare import is_prepared
from appliance.terms.counts import counted
from appliance.terms.environment import EVENTS_VARIABLE, short_root, temporary_env

_LOOK_EVERY_S = 0.2
_TEMPORARY = "appliance-"
_RANDOM = 8  # characters that tempfile adds

# Codes of findings, by what a command uses.
OF_THE_WEIGHTS = frozenset({"model-weights", "model-types", "model-unproven"})
OF_THE_MODEL = OF_THE_WEIGHTS | {
    *("remote-code", "architecture", "model-missing", "model-incomplete", "model-damaged", "model-unreachable"),
    *("model-refused", "model-revision", "model-unreadable", "model-gguf", "model-package"),
}
OF_THE_DATA = frozenset({"data", "data-unreachable"})
OF_A_PROFILE = frozenset({"profile"})
OF_AN_ENGINE = frozenset(
    {"python-version", "missing-library", "no-gpu", "wrong-gpu", "heads", "context", "rope", "window", "version"}
)


def make_inputs(plan: RunPlan, *, command: str) -> None:
    """Make model and data of the recipe, as `train` does, if the cache lacks them. Raises as `run_child` does."""
    if is_prepared(plan):
        return
    console.say("making the recipe's model and data (kept for later)")
    plan_file = Path(plan.run_dir) / "plan.json"
    plan.write(plan_file)
    run_child(
        ["appliance.tasks.prepare", str(plan_file)], command=command, folder=Path(plan.run_dir), env=dict(plan.env)
    )


def run_child(
    module: list[str], *, command: str, folder: Path, env: dict[str, str], tick: Callable[[], None] = lambda: None
) -> None:
    """Run a module of ours with its arguments; `tick` is called while it runs and once after.

    command: the command that people typed.  folder: of the work, removed by the caller. When the child ends with
    another code than 0: raises the error of ours that it left as an event in the folder, else EngineError that names
    the log, which is then kept beside the folder.
    """
    log, began_s = folder / "child.log", time.time()
    code = _run(module, log=log, env={**env, EVENTS_VARIABLE: str(folder)}, tick=tick)
    if code:
        failure = first_failure(folder, since_s=began_s)  # a folder may have had a child before this one
        is_told = failure is not None and failure.exit_code not in (None, ApplianceError.exit_code)
        kind = (error_class(failure.error) if is_told else None) or EngineError
        message = failure.what if failure else f"{command}: {module[0]} ended with code {code}"
        hint = failure.hint if is_told else ""
        raise kind.retold(message, hint=hint or f"its log: {_keep(log, beside=folder, command=command)}")


def _keep(log: Path, *, beside: Path, command: str) -> Path:
    """Move the log to where it stays, over the last failure's, or under another name where that one cannot be
    replaced."""
    kept = beside.parent / f"{command}-failed.log"
    try:
        return log.replace(kept)
    except OSError:  # another user's in a folder of many users, or a folder of that name
        descriptor, own = tempfile.mkstemp(prefix=f"{command}-failed-", suffix=".log", dir=beside.parent)
        os.close(descriptor)
        return log.replace(own)


def _run(module: list[str], *, log: Path, env: dict[str, str], tick: Callable[[], None]) -> int:
    with log.open("wb") as out, _own_temporary() as temporary:
        process = subprocess.Popen(
            module_argv(*module),
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | temporary | env,
            start_new_session=True,  # its own group: an engine may start processes itself
        )
        try:
            while process.poll() is None:
                time.sleep(_LOOK_EVERY_S)
                tick()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    tick()
    return process.returncode


@contextlib.contextmanager
def _own_temporary() -> Iterator[dict[str, str]]:
    """Have an engine leave what it leaves in TMPDIR in a folder that goes with it; nothing where its sockets would have
    too long a path there. Raises PreflightError when none can be made."""
    root = Path(tempfile.gettempdir())
    if short_root(root, length=len(_TEMPORARY) + _RANDOM) != root:
        yield {}
        return
    try:
        temporary = tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=root, ignore_cleanup_errors=True)
    except OSError as error:
        raise cannot_write(root, error, setting="TMPDIR") from error
    with temporary as folder:
        yield temporary_env(Path(folder))


@contextlib.contextmanager
def work_folder(run_dir: str, *, command: str) -> Iterator[Path]:
    """Make a folder below cluster.run_dir, removed at the end. Raises PreflightError when none can be made there."""
    root = full_path(run_dir)
    try:
        root.mkdir(parents=True, exist_ok=True)
        work = tempfile.TemporaryDirectory(dir=root, prefix=f".{command}-")
    except OSError as error:
        raise cannot_write(root, error) from error
    with work as folder:
        yield Path(folder)


@contextlib.contextmanager
def folder_elsewhere(*, command: str) -> Iterator[Path]:
    """Make a folder for work that leaves nothing in the user's own; only the log of a failure stays, beside it.
    Nobody else may enter what holds both."""
    root = Path(tempfile.mkdtemp(prefix=f"appliance-{command}-"))
    try:
        (root / "work").mkdir()
        yield root / "work"
    finally:
        shutil.rmtree(root / "work", ignore_errors=True)
        with contextlib.suppress(OSError):  # the log is there
            root.rmdir()


@contextlib.contextmanager
def new_folder(folder: Path, *, option: str) -> Iterator[None]:
    """Make a folder before any work, so that none is lost. If nothing came into it, it goes again. option: of the
    command, which names the folder.  Raises PreflightError when it cannot be made or written, or the disk fills."""
    try:
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise cannot_write(folder, error, setting=option) from error
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise cannot_write(folder, error, setting=option) from error
    finally:
        with contextlib.suppress(OSError):  # not empty: the user's now
            for each in missing:
                each.rmdir()


def examine_for(plans: Iterable[RunPlan], *, recipe: Recipe, host: HostFacts, about: frozenset[str]) -> None:
    """Show what preflight finds about the plans, of the codes that the command needs. recipe: the plans' recipe.
    Raises PreflightError when one is an error."""
    # Nothing here uses the task's code or a chat template, and some commands make their own model.
    read_weights = not about.isdisjoint(OF_THE_WEIGHTS)
    read = partial(read_inputs, ask_hub=True, run_code=False, read_weights=read_weights, try_template=False)
    found = [finding for plan in plans for finding in judge(plan, host=host, inputs=read(plan))]
    stop_on_errors([recipe.placed(finding) for finding in dict.fromkeys(found) if finding.code in about])


def stop_on_errors(findings: list[Finding]) -> None:
    """Show the findings that are more than information. Raises RecipeError when the recipe has a fault,
    PreflightError when one is another error."""
    refuse_faults(findings)
    for line in finding_lines([each for each in findings if each.severity is not Severity.INFO]):
        console.say(line)
    raise_on_errors(findings)


def raise_on_errors(findings: list[Finding]) -> None:
    """Raise PreflightError when one of the findings, which were shown, is an error."""
    errors = sum(finding.severity is Severity.ERROR for finding in findings)
    if errors:
        raise PreflightError(f"this plan cannot run here: {counted(errors, 'finding')} above")

"""What a command that is no training does first: a folder for its work, and preflight about what it needs."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from appliance import console
from appliance.errors import PreflightError
from appliance.plan.host import HostFacts
from appliance.preflight.checks import judge
from appliance.preflight.finding import Finding, Severity, lines
from appliance.preflight.inputs import read_inputs
from appliance.recipe.text import full_path
from appliance.record.plan import RunPlan
from appliance.record.session import cannot_write

# Codes of findings, by what a command uses.
OF_THE_MODEL = frozenset(
    {
        *("remote-code", "architecture", "model-missing", "model-incomplete", "model-damaged", "model-unreachable"),
        *("model-refused", "model-revision", "model-unreadable"),
    }
)
OF_THE_DATA = frozenset({"data", "data-unreachable"})
OF_A_PROFILE = frozenset({"profile"})
OF_AN_ENGINE = frozenset({"python-version", "missing-library", "no-gpu", "wrong-gpu", "heads", "context", "version"})


@contextlib.contextmanager
def work_folder(run_dir: str, *, command: str) -> Iterator[Path]:
    """A folder below cluster.run_dir, gone at the end. Raises PreflightError when none can be made there."""
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
    """A folder for work that leaves nothing in the user's own; only the log of a failure stays, beside it.

    Nobody else may enter what holds both.
    """
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
    """Make a folder before any work, so that none is lost. If nothing came into it, it goes again.

    option: of the command, which names the folder.  Raises PreflightError when it cannot be made or written.
    """
    try:
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise cannot_write(folder, error, setting=option) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # not empty: the user's now
            for each in missing:
                each.rmdir()


def examine_for(plans: Iterable[RunPlan], *, host: HostFacts, about: frozenset[str]) -> None:
    """Say what preflight finds about the plans, of the codes that the command needs.

    Raises PreflightError when one is an error.
    """
    found = [finding for plan in plans for finding in judge(plan, host=host, inputs=read_inputs(plan, ask_hub=True))]
    stop_on_errors([finding for finding in dict.fromkeys(found) if finding.code in about])


def stop_on_errors(findings: list[Finding]) -> None:
    """Say the findings that are more than information. Raises PreflightError when one is an error."""
    for line in lines([each for each in findings if each.severity is not Severity.INFO]):
        console.say(line)
    raise_on_errors(findings)


def raise_on_errors(findings: list[Finding]) -> None:
    """For findings that were said. Raises PreflightError when one is an error."""
    errors = sum(finding.severity is Severity.ERROR for finding in findings)
    if errors:
        raise PreflightError(f"this host cannot run the plan: {errors} finding{'s' if errors > 1 else ''} above")

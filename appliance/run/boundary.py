"""The boundary of a child process: what it fails with becomes an event of the run and an exit code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from appliance.errors import ApplianceError
from appliance.run.events import append_failure


def told(run_dir: Path, work: Callable[[], object]) -> int:
    """Do the work; 0, or the exit code of an error of ours. Any other error is told as our own fault and goes on.

    run_dir: the folder whose events say it.
    """
    try:
        work()
    except ApplianceError as error:
        append_failure(run_dir, error)
        return error.exit_code
    except Exception as error:  # every failure becomes an event, whatever it is
        append_failure(run_dir, ApplianceError(f"{type(error).__name__}: {error}", hint="the log has the whole story"))
        raise
    return 0

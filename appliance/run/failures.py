"""Where an error leaves its process: said there, as an event of the run, so that its kind, hint and exit code are kept.

vLLM and Ray send only the text of an error to whoever called, and of an error at start-up not even that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from appliance.errors import ApplianceError
from appliance.plan.env import PLAN_VARIABLE
from appliance.run.events import append_failure


@contextlib.contextmanager
def report_failures(run_dir: Path | None = None) -> Iterator[None]:
    """An error of ours inside the block becomes a `failure` event, and goes on.

    run_dir: the folder whose events say it, None: of the run that this process belongs to; outside of one it only goes
    on.
    """
    try:
        yield
    except ApplianceError as error:
        if run_dir is None and PLAN_VARIABLE in os.environ:
            run_dir = Path(os.environ[PLAN_VARIABLE]).parent
        if run_dir is not None:
            append_failure(run_dir, error)
        raise


def exit_code_of(work: Callable[[], object], *, run_dir: Path) -> int:
    """What a child ends with: 0, or the code of an error of ours. Any other is told as our own fault, and goes on.

    run_dir: the folder whose events say it.
    """
    try:
        with report_failures(run_dir):
            work()
    except ApplianceError as error:
        return error.exit_code
    except Exception as error:  # every failure becomes an event, whatever it is
        append_failure(run_dir, ApplianceError(f"{type(error).__name__}: {error}", hint="the log has the whole story"))
        raise
    return 0

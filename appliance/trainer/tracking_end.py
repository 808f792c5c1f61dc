"""The backends of `logging.backends` get their last word: with a time limit, and never instead of how the run ended."""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from appliance.run.events import append_event

FINISH_WITHIN_S = 30.0  # wandb uploads for as long as its server lets it wait

_logger = logging.getLogger(__name__)


def finish_tracking(finish: Callable[[], object], *, run_dir: Path, within_s: float = FINISH_WITHIN_S) -> None:
    """Call `finish`, of verl's Tracking, and wait at most `within_s` seconds; what goes wrong becomes a `note`.

    Never raises: it would replace the error that the run may be ending with, and the numbers are in metrics.jsonl.
    """
    failed: list[str] = []

    def work() -> None:
        try:
            finish()
        except Exception as error:  # the boundary of other people's code
            failed.append(f"{type(error).__name__}: {error}")

    # trackio knows its run by a context variable; on a daemon thread nothing waits for it at the end
    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name="end-tracking", daemon=True)
    thread.start()
    thread.join(within_s)
    why = f"not done within {within_s:g} s" if thread.is_alive() else "".join(failed)
    if why:
        _note(run_dir, why)


def _note(run_dir: Path, why: str) -> None:
    what = "a backend of logging.backends did not end well: the last numbers may be missing there"
    try:
        append_event(run_dir, kind="note", what=what, why=why)
    except OSError as error:
        _logger.warning("%s (%s); no event could be written: %s", what, why, error)

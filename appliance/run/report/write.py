"""`report.html` in a run's folder: at a command, and by the launcher while the run goes on."""

from __future__ import annotations

import os
import time
from pathlib import Path

from appliance import console
from appliance.run.report.folder import read_view
from appliance.run.report.page import page
from appliance.run.session import cannot_write
from appliance.run.status import find_run
from appliance.run.summary import REPORT_FILE, typed_path

_EVERY_S = 10.0
_AT_LEAST_EVERY_S = 60.0  # without news, too: a page that was not written for long says that its launcher may be gone
_TIMES_ITS_COST = 50


def print_report(run: str, *, run_root: Path, output: Path | None) -> None:
    """Make the page anew, and say where it is. output: another file than the one in the run's folder.

    Raises RecipeError when there is no such run, PreflightError when the page cannot be written.
    """
    run_dir = find_run(run, run_root=run_root)
    target = output or run_dir / REPORT_FILE
    try:
        write_page(run_dir, target=target)
    except OSError as error:
        raise cannot_write(target, error, setting="-o") from error
    console.out(typed_path(target.absolute()))


def write_page(run_dir: Path, *, target: Path) -> None:
    """Whole or not at all. Raises OSError and RecipeError."""
    text = page(read_view(run_dir), now=time.time())
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(target)


class LivePage:
    """The page of a run while its launcher lives, written when something is new, and seldom enough to cost nothing.

    What shows a run must not end it: whatever goes wrong here is said once, and no page is written any more.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._next = 0.0
        self._stale = True
        self._written = 0.0
        self._broken = False

    def tick(self, *, news: bool, now: float) -> None:
        """now: s of a steady clock."""
        self._stale |= news or now >= self._written + _AT_LEAST_EVERY_S
        if not self._stale or now < self._next:
            return
        started = time.perf_counter()
        self.write()
        self._written = now
        self._next = now + max(_EVERY_S, _TIMES_ITS_COST * (time.perf_counter() - started))

    def write(self) -> None:
        if self._broken:
            return
        self._stale = False
        try:
            write_page(self._run_dir, target=self._run_dir / REPORT_FILE)
        except Exception as error:  # the boundary, see above
            self._broken = True
            console.say(f"warning: {REPORT_FILE} cannot be written: {type(error).__name__}: {error}")

"""`report.html` in a run's folder: at a command, and by the launcher while the run goes on."""

from __future__ import annotations

import os
import time
from pathlib import Path

from appliance import console
from appliance.errors import RecipeError
from appliance.files import write_whole
from appliance.record import events
from appliance.record.session import RunStatus, cannot_write
from appliance.report.folder import RunReader, RunView, find_run, read_view, reading
from appliance.report.page import page
from appliance.report.summary import REPORT_FILE, typed_path

_EVERY_S = 10.0
_AT_LEAST_EVERY_S = 60.0  # without news, too: a page that was not written for long says that its launcher may be gone
_TIMES_ITS_COST = 50


def print_report(run: str, *, run_root: Path, output: Path | None) -> None:
    """Make the page anew, and say where it is. output: another file than the one in the run's folder.

    Raises RecipeError when there is no such run or it cannot be read, PreflightError when the page cannot be written.
    """
    run_dir = find_run(run, run_root=run_root)
    target = output or run_dir / REPORT_FILE
    if output is not None and os.path.isdir(output):  # unlike Path.is_dir it takes any text
        raise RecipeError([(f"-o: {output} is a folder", "name a file, or leave -o out")])
    with reading(run_dir):
        content = _content(read_view(run_dir), may_restart=False)
    try:
        write_whole(target, content, durable=False)
    except OSError as error:
        raise cannot_write(target, error, setting="-o") from error
    console.out(typed_path(target.absolute()))


def write_page(run: RunReader, *, target: Path, may_restart: bool = False) -> None:
    """may_restart: as of LivePage. Raises OSError and RecipeError."""
    write_whole(target, _content(run.view(), may_restart=may_restart), durable=False)


def _content(view: RunView, *, may_restart: bool) -> bytes:
    """Text that is no UTF-8 costs only itself. may_restart: as of LivePage."""
    awaits = may_restart and view.record.state is RunStatus.FAILED
    awaits = awaits and events.may_restart(view.run_dir, code=view.record.exit_code or 0)
    return page(view, now=time.time(), awaits_restart=awaits).encode(errors="replace")


class LivePage:
    """The page of a run while its launcher lives, written when something is new, and seldom enough to cost nothing.

    What shows a run must not end it: what goes wrong here is said once. A disk that is full now may have room later,
    so a page that could not be written is tried again when it is due; after any other error none is written any more.
    may_restart: a run that ended by a fault may go on by itself, so its page is to load itself again.
    """

    def __init__(self, run_dir: Path) -> None:
        self.may_restart = False
        self._run_dir = run_dir
        self._run = RunReader(run_dir)
        self._next = 0.0
        self._stale = True
        self._written = 0.0
        self._warned = False
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
        try:
            write_page(self._run, target=self._run_dir / REPORT_FILE, may_restart=self.may_restart)
        except Exception as error:  # the boundary, see above
            self._broken = not isinstance(error, OSError)
            if not self._warned:
                console.say(f"warning: {REPORT_FILE} cannot be written: {type(error).__name__}: {error}")
            self._warned = True
        else:
            self._stale = False

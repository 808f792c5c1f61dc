"""Save and stop: hears the launcher's request in every phase, and knows what there is to save.

A thread looks for the request. The trainer's main thread asks `check()` wherever it can be left without losing what it
has: before a step, all the time while it waits for rollouts, before the log-probabilities and before the update. From
the update's begin to the step's line in `metrics.jsonl` the weights are ahead of what is written down: there the step
is finished first. Where nothing is left to save, the thread ends the process by itself, whatever the main thread is in.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from appliance.errors import ApplianceError, Interrupted, SavedAndStopped
from appliance.record.events import append_event
from appliance.record.session import asked_to_stop

LOOK_EVERY_S = 0.5


class StopAsked(Exception):
    """Raised by `check()` in the trainer's main thread: leave everything, save, end."""


class Stopping:
    """Requests to stop an attempt, and the points at which it may."""

    finished: int
    """Last step whose line is written."""
    saved: int
    """Step of the newest complete checkpoint; 0: none."""
    why: str
    """Name of the signal, or an empty text."""

    def __init__(self, run_dir: Path, *, resumed_step: int = 0, end: Callable[[int], None] = os._exit) -> None:
        """resumed_step: of the checkpoint that this attempt resumes from, 0 without one.  end: leaves the process."""
        self.finished = resumed_step
        self.saved = resumed_step
        self._run_dir = run_dir
        self._end = end
        self._stop_requested = threading.Event()
        self.why = ""
        self._busy = False
        self._moving = threading.RLock()
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="stop-watch", daemon=True).start()

    @property
    def is_requested(self) -> bool:
        return self._stop_requested.is_set()

    def check(self) -> None:
        """Raise StopAsked when the run was asked to stop. Called where the main thread may leave its work."""
        if self.is_requested:
            raise StopAsked

    def begin_change(self) -> None:
        """Note that the weights change now: until the step is finished the run does not stop."""
        with self._moving:
            self._busy = True

    def end_step(self, step: int, *, saved: int) -> None:
        """Note that the step's line is written. saved: as the attribute."""
        with self._moving:
            self.finished, self.saved, self._busy = step, saved, False

    def note_saved(self, step: int) -> None:
        with self._moving:
            self.saved = step

    def over(self) -> None:
        """Note that the training is done: a request changes nothing any more."""
        with self._moving:
            self._over.set()

    def leave(self) -> ApplianceError:
        """Write down how it ended, for the launcher, and return the error that ends this process."""
        with self._moving:
            self._over.set()
            why, step = self.why or "a request", self.saved
            outcome = f"the state after step {step} is saved" if step else "there was nothing to save"
            what = f"stopped by {why}, {outcome}"
            append_event(self._run_dir, kind="stop", what=what, why=why, **({"step": step} if step else {}))
            return SavedAndStopped(what) if step else Interrupted(what)

    def _watch(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            if not self.is_requested and (why := asked_to_stop(self._run_dir)):
                self.why = why
                self._stop_requested.set()
            if self.is_requested:
                with self._moving:
                    if not self._over.is_set() and not self._busy and self.finished == self.saved:
                        self._end(self.leave().exit_code)
                        return

"""Whether a node that joined is still of use, looked after from beside Ray, which may wait for ever.

`ray start --block` goes on when its scheduler ended without an error, and a scheduler hears nothing of a head whose
host went silent. So `join` looks for itself: does the head's port answer, is there a scheduler, what does run.json say?
"""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from appliance import console
from appliance.cluster.run_notice import end_of, read_notice
from appliance.preflight.access import head_problem
from appliance.processes import find_processes
from appliance.terms.environment import RECONNECT_S, RUN_VARIABLE

LOOK_EVERY_S = 2.0
SCHEDULER = "raylet"
_STARTED = "Ray runtime started"
_LOOKS_WITHOUT = 3  # Ray says why its scheduler died a second or two after its death


class NodeIsOver(Exception):
    """Ends Ray on this node: there is nothing that it could still do."""


@dataclass(frozen=True)
class Look:
    """silent_s: since when the head has not answered, 0 while it does.  ended: its training did, by run.json.

    without_scheduler: how many looks, the last one included, have found none.
    """

    silent_s: float = 0.0
    ended: bool = False
    without_scheduler: int = 0


def is_over(look: Look) -> bool:
    """A head that is silent may only be slow, but not when its training ended."""
    is_gone = look.silent_s >= RECONNECT_S or (look.silent_s > 0 and look.ended)
    return is_gone or look.without_scheduler >= _LOOKS_WITHOUT


class NodeWatch:
    """Looks on a thread of its own, for a host that went silent takes seconds to not answer.

    folder: of `join`, the mark of the node's processes.  log: of Ray.
    """

    def __init__(self, head: str, *, folder: Path, log: Path) -> None:
        self._head = head
        self._folder = folder
        self._log = log
        self._look = Look()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="node-watch", daemon=True)
        self._silent_at = -math.inf
        self.has_joined = False

    @property
    def was_silent(self) -> bool:
        """Whether the head was silent a moment ago: one that was started anew ends the nodes of the one before."""
        return time.monotonic() - self._silent_at < RECONNECT_S

    def __enter__(self) -> NodeWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()

    def tick(self) -> None:
        """Say, once, that Ray runs here. Raises NodeIsOver."""
        if not self.has_joined and self._log.exists() and _STARTED in self._log.read_text(errors="replace"):
            self.has_joined = True
            console.say("joined; this node works for the training until it ends")
        if is_over(self._look):
            raise NodeIsOver

    def _watch(self) -> None:
        answered = time.monotonic()
        while not self._over.wait(LOOK_EVERY_S):
            if not head_problem(self._head):
                answered = time.monotonic()
                silent_s = 0.0
            else:
                self._silent_at = time.monotonic()
                silent_s = self._silent_at - answered
            training = read_notice(self._folder)
            has_scheduler = not self.has_joined or self._has_scheduler()
            self._look = Look(
                silent_s=silent_s,
                ended=training is not None and end_of(training) is not None,
                without_scheduler=0 if has_scheduler else self._look.without_scheduler + 1,
            )

    def _has_scheduler(self) -> bool:
        ours = find_processes(f"{RUN_VARIABLE}={self._folder}", below=os.getpid())
        return any(process.name == SCHEDULER for process in ours)

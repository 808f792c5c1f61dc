"""Looks after the rollout engines while the trainer waits for them.

An engine that dies in the middle of a weight update leaves verl's sender waiting for an answer that cannot come. The
trainer's main thread is then inside that wait, so the watch does not raise: it reports and ends the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import ray
from ray.actor import ActorHandle

from appliance.errors import ApplianceError, EngineError

LOOK_EVERY_S = 2.0
ANSWER_WITHIN_S = 60.0  # a server that loads a processor for a minute is slow, not dead: its event loop still answers


class EngineWatch:
    """servers: rollout servers with `engine_problem`.  on_death: gets the error about the first problem, on the watch's
    thread, and does not return."""

    def __init__(self, servers: list[ActorHandle], *, on_death: Callable[[ApplianceError], None]) -> None:
        self._servers = servers
        self._on_death = on_death
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="engine-watch", daemon=True).start()

    def stop(self) -> None:
        """Before the engines are ended on purpose."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            for replica, server in enumerate(self._servers):
                problem = _problem(server)
                if problem and not self._over.is_set():
                    hint = "the log has the engine's own words"
                    self._on_death(EngineError(f"rollout engine {replica} {problem}", hint=hint))
                    return


def _problem(server: ActorHandle) -> str:
    """What is wrong with a server's engine, or nothing."""
    try:
        return ray.get(server.engine_problem.remote(), timeout=ANSWER_WITHIN_S)
    except ray.exceptions.GetTimeoutError:
        return f"did not answer for {ANSWER_WITHIN_S:.0f} s"
    except ray.exceptions.RayActorError:
        return "died: its server's process is gone"
    except ray.exceptions.RayError as error:
        return f"cannot be asked: {type(error).__name__}"

"""Looks after the processes that the trainer needs and does not talk to all the time: Ray's own, and every actor.

A worker that dies while nobody waits for it, or a Ray service whose loss makes the next call wait for a minute or for
ever, is named within seconds, by what Ray knows of it. The trainer's main thread may be inside a wait that nothing
interrupts, so the watch reports and ends the process, as that of the engines does (engines.py).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray._private import state, worker

from appliance.errors import ApplianceError, EngineError, ProcessDied

LOOK_EVERY_S = 2.0
NAMED_AFTER_S = 2 * LOOK_EVERY_S  # by then a worker that died has been named, and this process ended
SERVICES_EVERY_S = 0.05  # without its raylet Ray ends this process at its next word to it: be there first
SERVICES = {"raylet": "Ray's scheduler (raylet)", "gcs_server": "Ray's control service (GCS)"}
SERVER = "GroupServer"
ROLES = {
    "WorkerDict": "a training worker",
    SERVER: "a rollout server",
    "TransferQueueController": "the TransferQueue's controller",
    "SimpleStorageUnit": "a storage unit of the TransferQueue",
}
_MEANT = ("`ray.kill`", "references to the actor were removed", "INTENDED", "job finished")
_HINT = (
    "often the kernel (sudo dmesg | tail) or Ray (`low on memory` in the log) ended it for want of memory; "
    "the log has its last words"
)


class ProcessWatch:
    """Watch of the processes that training needs."""

    def __init__(self, *, on_death: Callable[[ApplianceError], None], has_services: bool) -> None:
        """on_death: gets the error about the first death, on the watch's thread, and does not return.  has_services:
        whether this process started Ray's services; those of a cluster have their own watch (cluster/form.py)."""
        self._on_death = on_death
        self._over = threading.Event()
        if has_services:
            threading.Thread(target=self._watch_services, name="service-watch", daemon=True).start()
        threading.Thread(target=self._watch_actors, name="actor-watch", daemon=True).start()

    def stop(self) -> None:
        """Stop the watch, before Ray is ended on purpose."""
        self._over.set()

    def _watch_services(self) -> None:
        """Watch Ray's services, apart from the actors: with the control service gone, asking for those would wait."""
        processes = worker._global_node.all_processes
        services = {kind: processes[kind][0].process for kind in SERVICES}
        while not self._over.wait(SERVICES_EVERY_S):
            for kind, process in services.items():
                code = process.poll()
                if code is not None:
                    self._tell(ProcessDied(f"{SERVICES[kind]} died: {describe_exit(code)}", hint=_HINT))

    def _watch_actors(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            try:
                actors = state.actors(job_id=worker.global_worker.current_job_id).values()  # of this run alone
            except ray.exceptions.RayError:
                continue  # the other thread says which service is gone
            deaths = [error for error in map(error_of_death, actors) if error is not None]
            if deaths:
                self._tell(deaths[0])

    def _tell(self, error: ApplianceError) -> None:
        if not self._over.is_set():
            self._over.set()
            self._on_death(error)


def error_of_death(actor: Mapping[str, Any]) -> ApplianceError | None:
    """Return the error about an actor of Ray's table, None while it lives and when it was ended on purpose."""
    if actor["State"] != "DEAD":
        return None
    cause = str(actor.get("DeathCause") or "")
    if any(words in cause for words in _MEANT):
        return None
    name = str(actor["ActorClassName"]).rpartition(".")[2]  # a class made in a function has the function's name, too
    kind = EngineError if name == SERVER else ProcessDied
    return kind(f"{ROLES.get(name, 'a worker')} died: {name}, process {actor['Pid']}", hint=_HINT)


def describe_exit(code: int) -> str:
    """Describe for people how a process ended: `signal 9 (SIGKILL)`, `exit code 1`. code: as subprocess gives it."""
    if code >= 0:
        return f"exit code {code}"
    names = {each.value: each.name for each in signal.Signals}
    return f"signal {-code} ({names.get(-code, 'unknown')})"

"""What a rollout server imports takes seconds of one core: a worker of Ray's does it before the server is there.

Ray gives a process that ran a task to no actor, but beside the process of a task it starts another one of the same
environment, to have it ready. So `order` hands Ray tasks that do nothing. The first processes to arrive take a ticket
each, run them and end; the next ones import, and Ray makes servers of those. Where it does not come to that, the server
imports later, as it would without this.

Every worker imports this module before its first work: `RAY_preload_python_modules`, plan/env.py.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from pathlib import Path

from appliance.plan.env import AHEAD_VARIABLE, RAY_DIR_VARIABLE

_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
_TICKETS = "ticket-*"


def order(servers: int, *, env: dict[str, str]) -> None:
    """Have `servers` processes import ahead. Ray runs here.  env: exactly what verl will start a server with."""
    import ray

    tickets = Path(os.environ[RAY_DIR_VARIABLE])
    for number in range(servers):
        tickets.joinpath(_TICKETS.replace("*", str(number))).touch()
    task = ray.remote(max_calls=1, runtime_env={"env_vars": env})(_nothing)
    for _ in range(servers):
        task.remote()


def has_ticket(folder: Path) -> bool:
    """Take one. Of several processes at once each ticket goes to one."""
    for ticket in folder.glob(_TICKETS):
        with contextlib.suppress(FileNotFoundError):  # another one was quicker
            ticket.unlink()
            return True
    return False


def _nothing() -> None:
    """The process ends after it: `max_calls`."""


if AHEAD_VARIABLE in os.environ and not has_ticket(Path(os.environ[RAY_DIR_VARIABLE])):
    importlib.import_module(_SERVER)

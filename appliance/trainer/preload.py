"""What a rollout server imports takes seconds of one core: a worker of Ray's does it before the server is there.

Ray makes no actor of a process that ran a task, but when it starts a process for a task it starts another one of the
same environment beside it, to have it ready. So `order` hands Ray tasks that do nothing: their processes end, and the
others become the servers. Which is which is open until a task runs, so both import.

Every worker imports this module before its first work (`RAY_preload_python_modules`, terms/environment.py). So actors
that load nothing else of ours, such as the TransferQueue's, write their stacks after a stall, too. A node's raylet
reads the variable in its own environment: on one host and at the head of a cluster. A node that joined does without.
"""

from __future__ import annotations

import importlib
import os

from appliance.record.liveness import RAY_ROLE, keep_stacks
from appliance.terms.environment import PRELOAD_VARIABLE

_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"


def order(servers: int, *, env: dict[str, str]) -> None:
    """Have `servers` processes import ahead. Ray runs here.  env: exactly what verl will start a server with."""
    import ray

    task = ray.remote(max_calls=1, runtime_env={"env_vars": env})(_nothing)
    for _ in range(servers):
        task.remote()


def _nothing() -> None:
    """The process ends after it: `max_calls`."""


keep_stacks(RAY_ROLE)

if PRELOAD_VARIABLE in os.environ:
    importlib.import_module(_SERVER)

"""What a rollout server imports takes seconds of one core: a worker of Ray's does it before the server is there.

Ray makes no actor of a process that ran a task. But when it starts a process for a task it starts another one of the
same environment beside it, to have it ready. So `order` hands Ray tasks that do nothing: their processes end, and the
others become the servers. Which is which is open until a task runs, so both import. Where it does not come to that, the
server imports later, as it would without this.

Every worker imports this module before its first work: `RAY_preload_python_modules`, terms/environment.py. That is
also how the actors that load nothing else of ours, such as those of the TransferQueue, come to write their stacks
after a stall. A node's raylet reads the variable in its own environment: so it is on one host and at the head of a
cluster. A node that joined does without: in a cluster nothing is ordered ahead, and stacks are the head's
(cluster/form.py).
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

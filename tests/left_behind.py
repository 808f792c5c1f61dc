"""What is left of the programs that a test started: those with a run's mark, and all that descend from the test.

The mark is in a process's environment, over which setproctitle writes a title, as vLLM (`VLLM::EngineCor`) and Ray
(`ray::WorkerDict`) do: such a process is found by descent alone. So that an orphan descends from the test and not from
process 1, the test adopts orphans.
"""

from __future__ import annotations

import os
from pathlib import Path

from appliance.launch.subreaper import become_subreaper
from appliance.processes import Process, find_processes
from appliance.terms.environment import RUN_VARIABLE

Bystanders = frozenset[tuple[int, int]]  # process ids with their start times: an id may be given away again


def bystanders() -> Bystanders:
    """Those below this process now: no later program has left them. Orphans are adopted from here on."""
    become_subreaper()
    return frozenset((each.pid, each.start) for each in find_processes(f"{RUN_VARIABLE}=", below=os.getpid()))


def left_of(run_dir: Path, *, since: Bystanders) -> list[Process]:
    """The living processes that carry the run's mark or descend from this one, without those that were there before."""
    found = find_processes(f"{RUN_VARIABLE}={run_dir}", below=os.getpid())
    return [each for each in found if (each.pid, each.start) not in since]

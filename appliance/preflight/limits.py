"""What this process may open and start, and how much memory its control group leaves it: read once, then judged."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance.control_groups import MEMBERSHIP, TREES, UNLIMITED, V2, groups_of, number_in, paths_of
from appliance.plan.host import Limits
from appliance.preflight.finding import Finding, error, warning

# Of the demo on 2 cores, counted while it trained: 13 processes had up to 115 files each and 400 threads together.
_FILES_OF_A_PROCESS = 1024  # ten times as many: Ray opens some per worker, vLLM per file of weights
_THREADS = 2048  # OpenMP and Ray start some per core, in every process
_THREADS_PER_CORE = 64
_MEMORY, _PIDS = "memory", "pids"


@dataclass(frozen=True)
class _MemoryFiles:
    """reclaimable: the key in memory.stat of page cache that the kernel takes back when memory is asked for."""

    most: str
    used: str
    reclaimable: str


_MEMORY_FILES = {
    V2: _MemoryFiles("memory.max", "memory.current", "inactive_file"),
    _MEMORY: _MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def read_limits(trees: Path = TREES, *, membership: Path = MEMBERSHIP) -> Limits:
    """trees: where they are mounted.  membership: which groups this process is in, as /proc says it."""
    paths = paths_of(membership)
    soft_threads, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    _, hard_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    pids = [number_in(group / "pids.max") for tree in (V2, _PIDS) for group in groups_of(trees, tree, paths)]
    memory = [_left(group, files) for tree, files in _MEMORY_FILES.items() for group in groups_of(trees, tree, paths)]
    return Limits(
        open_files=_limit(hard_files), threads=min(_limit(soft_threads), *pids), memory_free_bytes=min(memory)
    )


def _limit(value: int) -> int:
    return UNLIMITED if value == resource.RLIM_INFINITY else value


def _left(group: Path, files: _MemoryFiles) -> int:
    limit = number_in(group / files.most)
    if limit >= UNLIMITED:
        return UNLIMITED
    held = max(0, number_in(group / files.used) - _reclaimable(group / "memory.stat", key=files.reclaimable))
    return max(0, limit - held)


def _reclaimable(stat: Path, *, key: str) -> int:
    """Bytes; 0 where it is not said."""
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), 0)


def judge_limits(limits: Limits, *, cores: int) -> Iterator[Finding]:
    threads = max(_THREADS, _THREADS_PER_CORE * cores)
    if limits.open_files < _FILES_OF_A_PROCESS:
        message = f"a process may open {limits.open_files} files, Ray and vLLM want {_FILES_OF_A_PROCESS}"
        remedy = "ulimit -Hn 65536, or in a container --ulimit nofile=65536:65536"
        yield error("open-files", "ulimit -n", message, remedy)
    if limits.threads < threads:
        message = f"{limits.threads} processes and threads are allowed, a run on {cores} cores may start {threads}"
        remedy = "raise it (ulimit -u), or in a container --pids-limit=-1"
        yield warning("threads", "ulimit -u", message, remedy)

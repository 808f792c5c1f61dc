"""What this process may open and start, and how much memory its control group leaves it: read once, then judged."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from appliance.plan.host import UNLIMITED, Limits
from appliance.preflight.finding import Finding, Severity

# Of the demo on 2 cores, counted while it trained: 13 processes had up to 115 files each and 400 threads together.
_FILES_OF_A_PROCESS = 1024  # ten times as many: Ray opens some per worker, vLLM per file of weights
_THREADS = 2048  # OpenMP and Ray start some per core, in every process
_THREADS_PER_CORE = 64
_CONTROL_GROUP = Path("/sys/fs/cgroup")
_MEMORY = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
_PIDS = ("pids.max", "pids/pids.max")


def read_limits(control_group: Path = _CONTROL_GROUP) -> Limits:
    return Limits(
        open_files=_hard(resource.RLIMIT_NOFILE),
        threads=min(_hard(resource.RLIMIT_NPROC), *(_number(control_group / name) for name in _PIDS)),
        memory_free_bytes=min(_left(control_group / most, used=control_group / used) for most, used in _MEMORY),
    )


def _hard(which: int) -> int:
    limit = resource.getrlimit(which)[1]
    return UNLIMITED if limit == resource.RLIM_INFINITY else limit


def _number(file: Path) -> int:
    """`max`, no such file and what is no number mean: no limit."""
    try:
        text = file.read_text().strip()
    except OSError:
        return UNLIMITED
    return int(text) if text.isdigit() else UNLIMITED


def _left(most: Path, *, used: Path) -> int:
    limit = _number(most)
    return limit if limit >= UNLIMITED else max(0, limit - min(_number(used), limit))


def judge_limits(limits: Limits, *, cores: int) -> Iterator[Finding]:
    threads = max(_THREADS, _THREADS_PER_CORE * cores)
    if limits.open_files < _FILES_OF_A_PROCESS:
        message = f"a process may open {limits.open_files} files, Ray and vLLM want {_FILES_OF_A_PROCESS}"
        remedy = "ulimit -Hn 65536, or in a container --ulimit nofile=65536:65536"
        yield Finding(Severity.ERROR, "open-files", "ulimit -n", message, remedy)
    if limits.threads < threads:
        message = f"{limits.threads} processes and threads are allowed, a run on {cores} cores may start {threads}"
        remedy = "raise it (ulimit -u), or in a container --pids-limit=-1"
        yield Finding(Severity.WARNING, "threads", "ulimit -u", message, remedy)

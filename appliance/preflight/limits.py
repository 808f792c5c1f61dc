"""What this process may open and start, and how much memory its control group leaves it: read once, then judged."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance.plan.host import UNLIMITED, Limits
from appliance.preflight.finding import Finding, Severity

# Of the demo on 2 cores, counted while it trained: 13 processes had up to 115 files each and 400 threads together.
_FILES_OF_A_PROCESS = 1024  # ten times as many: Ray opens some per worker, vLLM per file of weights
_THREADS = 2048  # OpenMP and Ray start some per core, in every process
_THREADS_PER_CORE = 64
_CONTROL_GROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_V2, _MEMORY, _PIDS = "", "memory", "pids"  # version 1 has a tree per controller, version 2 one without a name


@dataclass(frozen=True)
class _MemoryFiles:
    """reclaimable: the key in memory.stat of page cache that the kernel takes back when memory is asked for."""

    most: str
    used: str
    reclaimable: str


_MEMORY_FILES = {
    _V2: _MemoryFiles("memory.max", "memory.current", "inactive_file"),
    _MEMORY: _MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def read_limits(control_group: Path = _CONTROL_GROUP, *, membership: Path = _MEMBERSHIP) -> Limits:
    """control_group: where the trees are mounted.  membership: which groups this process is in, as /proc says it."""
    paths = _paths(membership)
    soft_threads, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    _, hard_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    pids = [_number(group / "pids.max") for tree in (_V2, _PIDS) for group in _groups(control_group, tree, paths)]
    memory = [
        _left(group, files) for tree, files in _MEMORY_FILES.items() for group in _groups(control_group, tree, paths)
    ]
    return Limits(
        open_files=_limit(hard_files), threads=min(_limit(soft_threads), *pids), memory_free_bytes=min(memory)
    )


def _limit(value: int) -> int:
    return UNLIMITED if value == resource.RLIM_INFINITY else value


def _paths(membership: Path) -> dict[str, str]:
    """Controller -> path of this process's group in its tree, without the first slash."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split(":", 2) for line in lines if line.count(":") >= 2)
    return {name: path.lstrip("/") for _, names, path in fields for name in names.split(",")}


def _groups(control_group: Path, tree: str, paths: dict[str, str]) -> list[Path]:
    """The group of this process and all above it: each of them limits. Those that a container does not see are none."""
    top, path = control_group / tree, Path(paths.get(tree, ""))
    own = () if ".." in path.parts else (path, *path.parents)
    return [top, *(top / each for each in own)]


def _number(file: Path) -> int:
    """`max`, no such file and what is no number mean: no limit."""
    try:
        text = file.read_text().strip()
    except OSError:
        return UNLIMITED
    return int(text) if text.isdigit() else UNLIMITED


def _left(group: Path, files: _MemoryFiles) -> int:
    limit = _number(group / files.most)
    if limit >= UNLIMITED:
        return UNLIMITED
    held = max(0, _number(group / files.used) - _reclaimable(group / "memory.stat", key=files.reclaimable))
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
        yield Finding(Severity.ERROR, "open-files", "ulimit -n", message, remedy)
    if limits.threads < threads:
        message = f"{limits.threads} processes and threads are allowed, a run on {cores} cores may start {threads}"
        remedy = "raise it (ulimit -u), or in a container --pids-limit=-1"
        yield Finding(Severity.WARNING, "threads", "ulimit -u", message, remedy)

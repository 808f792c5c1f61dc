"""The control groups that this process is in, and the cores that they leave it. Both versions of the kernel's files.

Version 1 has a tree of groups per controller, version 2 one for all, without a name. Here and not in preflight, because
a training worker reads them too (trainer/worker.py), on its own node.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

UNLIMITED = 1 << 62


TREES = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
V2 = ""
_CPU = "cpu"


def usable_cores(trees: Path = TREES, *, membership: Path = MEMBERSHIP) -> int:
    """Count the cores that threads of this process can keep busy: as many as it may run on, or as its control groups
    give time of (`docker run --cpus`), whichever is less. A part of a core counts as one."""
    paths = paths_of(membership)
    version_2 = (_quota(group / "cpu.max") for group in groups_of(trees, V2, paths))
    version_1 = (
        _share(_text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us"))
        for group in groups_of(trees, _CPU, paths)
    )
    return min(len(os.sched_getaffinity(0)), *version_2, *version_1)


def _quota(file: Path) -> int:
    """Read a quota of version 2: `max 100000`, or `quota period` in microseconds."""
    quota, _, period = _text(file).partition(" ")
    return _share(quota, period)


def _share(quota: str, period: str) -> int:
    """Return the number of cores, at least 1. What is no number, 0 or negative (`max`, -1, no file) means: no limit."""
    if not (quota.isdigit() and period.isdigit() and int(quota) and int(period)):
        return UNLIMITED
    return math.ceil(int(quota) / int(period))


def paths_of(membership: Path) -> dict[str, str]:
    """Return, by controller, the path of this process's group in its tree, without the first slash.
    membership: as /proc says it."""
    lines = _text(membership).splitlines()
    fields = (line.split(":", 2) for line in lines if line.count(":") >= 2)
    return {name: path.lstrip("/") for _, names, path in fields for name in names.split(",")}


def groups_of(trees: Path, tree: str, paths: dict[str, str]) -> list[Path]:
    """List the group of this process and all above it, each of which limits; not those that a container
    does not see."""
    top, path = trees / tree, Path(paths.get(tree, ""))
    own = () if ".." in path.parts else (path, *path.parents)
    return [top, *(top / each for each in own)]


def number_in(file: Path) -> int:
    """Read the number in a file of a control group. `max`, no such file and what is no number mean: no limit."""
    text = _text(file)
    return int(text) if text.isdigit() else UNLIMITED


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""

"""Reads this host, once: its processor, GPUs, memory and limits. Judges nothing."""

from __future__ import annotations

import csv
import ctypes
import datetime
import importlib.util
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

from appliance.control_groups import MEMBERSHIP, TREES, UNLIMITED, V2, groups_of, number_in, paths_of, usable_cores
from appliance.plan.host import HostFacts, HostGpu, Limits
from appliance.preflight.container import read_container
from appliance.preflight.disk import nearest_existing

LIBRARIES = ("libnuma.so.1",)
PACKAGES = ("tensorboard", "trackio", "wandb", "flash_attn")
_NVIDIA_SMI_TIMEOUT_S = 10
_MEMORY_FILES = {  # tree -> most, used, and the key in memory.stat of page cache that the kernel takes back on demand
    V2: ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def read_host(run_root: Path) -> HostFacts:
    """Read the facts about this host. run_root: the folder that will hold the run folders; it need not exist."""
    memory, limits, cpu = psutil.virtual_memory(), read_limits(), _cpuinfo()
    return HostFacts(
        cores=usable_cores(),
        memory_bytes=min(memory.total, limits.memory_bytes),
        memory_free_bytes=min(memory.available, limits.memory_free_bytes),
        cpu_flags=frozenset(cpu.get("flags", "").split()),
        gpus=read_gpus(),
        python=sys.version_info[:2],
        missing_libraries=tuple(name for name in LIBRARIES if not _loads(name)),
        shm_free_bytes=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
        run_root_problem=_write_problem(nearest_existing(run_root)),
        packages=frozenset(name for name in PACKAGES if importlib.util.find_spec(name)),
        processor=_processor(cpu),
        container=read_container(run_root),
        limits=limits,
        today=datetime.date.today().isoformat(),
    )


def _write_problem(folder: Path) -> str:
    """Say why nothing can be made in the folder, or an empty text. Nothing is written: a probe leaves no trace."""
    if not os.path.isdir(folder):
        return f"{folder} is not a folder"
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return f"{folder} is on a read-only file system"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} cannot be written"
    return ""


def _cpuinfo() -> dict[str, str]:
    """Read /proc/cpuinfo of the first processor."""
    first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    fields = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}


def _processor(cpu: dict[str, str]) -> str:
    """Such as `AMD EPYC, family 25, model 1`: the name alone is the same for several generations under a hypervisor."""
    generation = (f"{word} {cpu[key]}" for word, key in (("family", "cpu family"), ("model", "model")) if key in cpu)
    return ", ".join(filter(None, (cpu.get("model name", ""), *generation)))


def read_gpus() -> tuple[HostGpu, ...]:
    """Read the GPUs by nvidia-smi; none where there is no such program, or where it fails (no driver). Memory that it
    does not report, as of some GPUs that share the host's, is 0."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return tuple(HostGpu(product=name, memory_bytes=(int(mib) if mib.isdigit() else 0) << 20) for name, mib in rows)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def read_limits(trees: Path = TREES, *, membership: Path = MEMBERSHIP) -> Limits:
    """Read the limits of this process and of its control groups. trees: where the groups are mounted.  membership:
    which groups this process is in, as /proc has it."""
    paths = paths_of(membership)
    threads, files = resource.getrlimit(resource.RLIMIT_NPROC)[0], resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    pids = [number_in(group / "pids.max") for tree in (V2, "pids") for group in groups_of(trees, tree, paths)]
    groups = [(group, names) for tree, names in _MEMORY_FILES.items() for group in groups_of(trees, tree, paths)]
    return Limits(
        open_files=_limit(files),
        threads=min(_limit(threads), *pids),
        memory_bytes=min(number_in(group / most) for group, (most, _, _) in groups),
        memory_free_bytes=min(_left(group, *names) for group, names in groups),
    )


def _limit(value: int) -> int:
    return UNLIMITED if value == resource.RLIM_INFINITY else value


def _left(group: Path, most: str, used: str, reclaimable: str) -> int:
    """Return the bytes of a control group's memory."""
    limit = number_in(group / most)
    if limit >= UNLIMITED:
        return UNLIMITED
    return max(0, limit - max(0, number_in(group / used) - _reclaimable(group / "memory.stat", key=reclaimable)))


def _reclaimable(stat: Path, *, key: str) -> int:
    """Return the bytes that the kernel could take back; 0 where the file does not say."""
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), 0)

"""The memory of a run's processes on the launcher's host, in `memory.jsonl`: measured now and then, never often.

Proportional set size: a page that several processes share counts in parts, so that a sum over processes is what they
take. Reading it makes the kernel walk the process's pages (45 ms for 1.7 GB, measured), so that the time between two
measurements is a hundred times what the last one took, and 5 s at least.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import asdict
from pathlib import Path

from pydantic.dataclasses import dataclass

from appliance.processes import find_processes
from appliance.record.events import append_line
from appliance.record.lines import STRICT, Count, Number, parse_line
from appliance.terms.environment import RUN_VARIABLE

MEMORY_FILE = "memory.jsonl"
_EVERY_S = 5.0
_TIMES_ITS_COST = 100


@dataclass(frozen=True, config=STRICT)
class MemorySample:
    """A line of `memory.jsonl`. time: unix s.  pss_bytes: of all processes together."""

    time: Number
    pss_bytes: Count
    processes: Count


class MemoryWatch:
    """Measures when it is time, and writes it down. A disk that is full now, or no /proc, costs nothing but samples."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._next = 0.0

    def tick(self, *, now: float) -> None:
        """now: s of a steady clock."""
        if now < self._next:
            return
        started = time.perf_counter()
        with contextlib.suppress(OSError):
            self._write()
        self._next = now + max(_EVERY_S, _TIMES_ITS_COST * (time.perf_counter() - started))

    def _write(self) -> None:
        below = find_processes(f"{RUN_VARIABLE}={self._run_dir}", below=os.getpid())
        sizes = [pss_bytes(pid) for pid in (os.getpid(), *(process.pid for process in below))]
        append_line(self._run_dir / MEMORY_FILE, asdict(MemorySample(time.time(), sum(sizes), len(sizes))))


def pss_bytes(pid: int) -> int:
    """Of one process; 0 for one that ended or belongs to somebody else."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) << 10


def read_memory(run_dir: Path) -> list[MemorySample]:
    """In their order; lines that cannot be read are left out."""
    path = run_dir / MEMORY_FILE
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return [sample for line in lines if (sample := parse_line(line, MemorySample)) is not None]

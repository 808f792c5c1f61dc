"""Processes of a run: how ours start; found by descent and by a mark in their environment; ended so that none is left.

Linux only, standard library only. A mark is an environment entry `NAME=value` that every process of a run inherits: it
finds what has left its parents and its session. (A process that rewrites its title, as Ray's do, may lose the mark:
those are found by descent.) A process is signalled through a pidfd after its start time was compared, so that a process
id that was given away again is never hit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_KILL_FOR_S = 5.0
_TRACKERS_FOR_S = 1.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # here: between fork and exec nothing is loaded


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    start: int
    """Clock ticks since boot."""
    name: str
    command: bytes
    """Arguments of the process, each ended by a zero byte."""

    @property
    def tracker(self) -> bool:
        """Whether it is one of Python's resource trackers, which remove shared memory once the processes that used it
        are gone."""
        return b"resource_tracker" in self.command

    def __str__(self) -> str:
        return f"{self.name} ({self.pid})"


def module_argv(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command of a child that runs one of our modules, or of our libraries'. -P: the current folder is the
    user's, and Python would look there first: a `random.py` of theirs would replace its own."""
    return (sys.executable, "-P", "-m", module, *arguments)


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it is gone, however that ended: the `preexec_fn`
    of a child that nobody else may look after."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def return_free_memory() -> None:
    """Give the kernel back what this process has freed.

    glibc keeps what lies between tensors that live on: a trainer of 134 M parameters held 1.5 GB more after 30 updates
    than after two. It takes 0.1 to 0.2 s there. With another C library nothing happens.
    """
    if (trim := getattr(_LIBC, "malloc_trim", None)) is not None:
        trim(0)


def find_processes(mark: str, *, below: int | None = None) -> list[Process]:
    """Find all living processes that carry the mark or descend from `below`, without this one. mark: `NAME=value`.
    below: a process id, or None for the mark alone."""
    pids = (int(entry) for entry in os.listdir(_PROC) if entry.isdigit())
    table = {one.pid: one for one in map(_read, pids) if one is not None}
    found = {pid for pid in table if _carries(pid, mark)}
    found |= _descendants(table, below) if below is not None else set()
    return [table[pid] for pid in sorted(found - {os.getpid(), below})]


def end_processes(
    find: Callable[[], list[Process]], *, patience_s: float, pause: Callable[[float], bool]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Wait for what `find` finds to go, then SIGTERM, then SIGKILL. Returns what had to be signalled to end, and what
    would not.

    patience_s: how long to wait before SIGTERM and again before SIGKILL.  pause(seconds): waits, and returns True when
    there is no more time to be patient.
    """
    remaining = _wait(find, patience_s, pause)
    ended = dict.fromkeys(map(str, remaining))
    for process in remaining:
        _send(process, signal.SIGTERM)
    remaining = _wait(find, patience_s, pause)
    ended |= dict.fromkeys(map(str, remaining))
    return tuple(ended), tuple(map(str, _kill(find, pause)))


def _wait(find: Callable[[], list[Process]], seconds: float, pause: Callable[[float], bool]) -> list[Process]:
    deadline = time.monotonic() + seconds
    while (matching := find()) and time.monotonic() < deadline:
        if pause(0.05):
            break
    return matching


def _kill(find: Callable[[], list[Process]], pause: Callable[[float], bool]) -> list[Process]:
    """SIGKILL until nothing is found; resource trackers get a moment to tidy up after the others."""
    start = time.monotonic()
    while (matching := find()) and time.monotonic() < start + _KILL_FOR_S:
        spare_trackers = time.monotonic() < start + _TRACKERS_FOR_S
        for process in matching:
            if not (process.tracker and spare_trackers):
                _send(process, signal.SIGKILL)
        pause(0.02)
    return matching


def _send(process: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        descriptor = os.pidfd_open(process.pid)
        try:
            again = _read(process.pid)
            if again is not None and again.start == process.start:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def _read(pid: int) -> Process | None:
    """Return one process, None when it is gone or only waits to be reaped. Fields: proc(5), /proc/PID/stat."""
    try:
        name, _, rest = (_PROC / str(pid) / "stat").read_text(errors="replace").partition(" (")[2].rpartition(") ")
        command = (_PROC / str(pid) / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = rest.split()
    if fields[0] in "ZX":
        return None
    return Process(pid, parent=int(fields[1]), start=int(fields[19]), name=name, command=command)


def _carries(pid: int, mark: str) -> bool:
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return os.fsencode(mark) in environment.split(b"\0")


def _descendants(table: dict[int, Process], root: int) -> set[int]:
    descendants: set[int] = set()
    edge = {root}
    while edge:
        edge = {pid for pid, process in table.items() if process.parent in edge} - descendants
        descendants |= edge
    return descendants

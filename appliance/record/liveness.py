"""What a process reports between two events: that it lives, and, when it hung, what it was doing.

The first is a file that it touches now and then. The second are the Python stacks of all its threads, written at
SIGUSR2 from inside the interpreter, also while its main thread waits in native code. The file for them is there from
the start, so that nobody signals a process that would die of it. Standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from appliance.terms.environment import LOG_DIR_VARIABLE

HEARTBEAT_FILE = ".heartbeat"
STACKS_FOLDER = "stacks"
WORKER_HOOK = "appliance.record.liveness.keep_stacks_of_worker"  # for Ray, which calls it in each worker of a run
RAY_ROLE = "ray"  # of an actor or an idle worker of Ray's that loads nothing of ours: its title says which
WORKER_ROLE = "worker"  # of every process that imports verl; a fork of one has it from its title
WRITE_WITHIN_S = 5.0
_BEAT_EVERY_S = 1.0
_SIGNAL = signal.SIGUSR2  # SIGUSR1 is the subreaper's
_SAYS = {RAY_ROLE: 0, WORKER_ROLE: 1}  # how much a role says; any other says more
_RAY_TITLE = re.compile(r"ray::(\w+)")


class Heartbeat:
    """Touches the file, at most once a second. Outside a run it does nothing."""

    def __init__(self) -> None:
        folder = os.environ.get(LOG_DIR_VARIABLE)
        self._path = Path(folder) / HEARTBEAT_FILE if folder else None
        self._beaten_at = float("-inf")

    def beat(self) -> None:
        now = time.monotonic()
        if self._path is None or now < self._beaten_at + _BEAT_EVERY_S:
            return
        self._beaten_at = now
        with contextlib.suppress(OSError):  # a full disk ends no rollout
            self._path.touch()


def last_beat(log_dir: Path) -> float:
    """Return the Unix time of the last sign of life of an attempt, s; 0 without one."""
    try:
        return (log_dir / HEARTBEAT_FILE).stat().st_mtime
    except OSError:
        return 0.0


@dataclass(frozen=True)
class _StacksFile:
    pid: int
    role: str
    path: Path
    file: IO[str]


_stacks_file: _StacksFile | None = None


def keep_stacks(role: str) -> None:
    """Have this process write its stacks on request. Does nothing outside a run. role: the beginning of the
    file's name; called again, the one that says more counts, or the new one. A forked process calls it for itself."""
    global _stacks_file
    folder = os.environ.get(LOG_DIR_VARIABLE)
    if not folder:
        return
    before = _stacks_file if _stacks_file is not None and _stacks_file.pid == os.getpid() else None
    if before is not None and _SAYS.get(role, 2) < _SAYS.get(before.role, 2):
        return
    with contextlib.suppress(OSError):  # a full disk ends no process: it only says less
        path = Path(folder) / STACKS_FOLDER / f"{role}-{os.getpid()}.txt"
        if before is not None:
            before.path.rename(path)
            file = before.file
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("w")
            faulthandler.register(_SIGNAL, file=file, all_threads=True)
        _stacks_file = _StacksFile(os.getpid(), role, path, file)


def forget_stacks() -> None:
    """Let go of the file in a fork: it is that of the process that was forked."""
    global _stacks_file
    if _stacks_file is not None:
        faulthandler.unregister(_SIGNAL)
        _stacks_file.file.close()
        _stacks_file = None


def keep_stacks_of_worker() -> None:
    """Have a worker of Ray's write its stacks from its start: actors that load nothing else of ours, too."""
    keep_stacks(RAY_ROLE)


def dump_stacks(log_dir: Path, *, living: Collection[int]) -> list[Path]:
    """Ask all living processes for their stacks and wait for them. Returns the files that say something, by name.

    log_dir: of the attempt.  living: the run's own process ids, so that a number given away again is never signalled.
    """
    files = sorted((log_dir / STACKS_FOLDER).glob("*-*.txt"))
    requested = [path for path in files if _pid(path) in living and _ask(_pid(path))]
    deadline = time.monotonic() + WRITE_WITHIN_S
    while time.monotonic() < deadline and not all(map(_says_something, requested)):
        time.sleep(0.1)
    return sorted(_with_ray_name(path) for path in requested if _says_something(path))


def _says_something(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_size > 0
    return False


def _with_ray_name(path: Path) -> Path:
    """Rename a file to what Ray calls the process, where that is all that is known of it."""
    pid = _pid(path)
    if path.name != f"{RAY_ROLE}-{pid}.txt":
        return path
    with contextlib.suppress(OSError):  # gone by now
        title = _RAY_TITLE.match(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"))
        return path.rename(path.with_name(f"{title[1]}-{pid}.txt")) if title else path
    return path


def _pid(path: Path) -> int:
    number = path.stem.rpartition("-")[2]
    return int(number) if number.isdigit() else 0


def _ask(pid: int) -> bool:
    try:
        os.kill(pid, _SIGNAL)
    except ProcessLookupError:
        return False
    return True

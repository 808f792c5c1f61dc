"""What every process of a run was doing when it hung: Python stacks of all threads, written at a signal.

A process that has called `keep_stacks` answers SIGUSR2 from inside the interpreter, also while its main thread waits in
native code. Its file is there from then on, so that nobody signals a process that would die of it. Standard library
only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import IO

from appliance.plan.env import LOG_DIR_VARIABLE

STACKS_FOLDER = "stacks"
WRITE_WITHIN_S = 5.0
_SIGNAL = signal.SIGUSR2  # SIGUSR1 is the keeper's
_file: IO[str] | None = None


def keep_stacks(role: str) -> None:
    """Have this process write its stacks when it is asked. Does nothing outside a run, or when it was called before.

    role: the beginning of the file's name.
    """
    global _file
    folder = os.environ.get(LOG_DIR_VARIABLE)
    if _file is not None or not folder:
        return
    with contextlib.suppress(OSError):  # a full disk ends no process: it only says less
        path = Path(folder) / STACKS_FOLDER / f"{role}-{os.getpid()}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        _file = path.open("w")
        faulthandler.register(_SIGNAL, file=_file, all_threads=True)


def dump_stacks(log_dir: Path, *, living: Collection[int], within_s: float = WRITE_WITHIN_S) -> list[Path]:
    """Ask all living processes for their stacks and wait for them. Returns the files that say something.

    log_dir: of the attempt.  living: the run's own process ids, so that a number given away again is never signalled.
    """
    files = sorted((log_dir / STACKS_FOLDER).glob("*-*.txt"))
    asked = [path for path in files if _pid(path) in living and _ask(_pid(path))]
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and not all(path.stat().st_size for path in asked):
        time.sleep(0.1)
    return [path for path in asked if path.stat().st_size]


def _pid(path: Path) -> int:
    number = path.stem.rpartition("-")[2]
    return int(number) if number.isdigit() else 0


def _ask(pid: int) -> bool:
    try:
        os.kill(pid, _SIGNAL)
    except ProcessLookupError:
        return False
    return True

"""A request to save and stop: a file in the run's folder, because no signal reaches the trainer's main thread in time.

Ray takes over the signal handlers of the process that starts it, and the trainer waits inside calls that no handler
interrupts. So the launcher, which is another process, catches the signal and leaves this file; the trainer looks for it
all the time (trainer/stopping.py). Standard library only.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from appliance.files import write_whole

STOP_FILE = ".stop"


def ask_to_stop(run_dir: Path, *, why: str) -> None:
    """Leave the request. why: the signal's name, one word.  Raises OSError (a full disk)."""
    write_whole(run_dir / STOP_FILE, f"{why}\n", durable=False)


def asked_to_stop(run_dir: Path) -> str:
    """Why the run was asked to stop, or an empty text when nobody asked."""
    try:
        return (run_dir / STOP_FILE).read_text().strip()
    except OSError:
        return ""


def forget_stop(run_dir: Path) -> None:
    """Before an attempt: the request of an earlier one holds no more."""
    with contextlib.suppress(OSError):
        (run_dir / STOP_FILE).unlink(missing_ok=True)

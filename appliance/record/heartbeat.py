"""A sign of life between two events: the trainer touches a file while rollouts arrive, the launcher looks at its time.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from appliance.terms.environment import LOG_DIR_VARIABLE

HEARTBEAT_FILE = ".heartbeat"
_EVERY_S = 1.0


class Heartbeat:
    """Touches the file, at most once a second. Outside a run it does nothing."""

    def __init__(self) -> None:
        folder = os.environ.get(LOG_DIR_VARIABLE)
        self._path = Path(folder) / HEARTBEAT_FILE if folder else None
        self._beaten_at = float("-inf")

    def beat(self) -> None:
        now = time.monotonic()
        if self._path is None or now < self._beaten_at + _EVERY_S:
            return
        self._beaten_at = now
        with contextlib.suppress(OSError):  # a full disk ends no rollout
            self._path.touch()


def last_beat(log_dir: Path) -> float:
    """Unix time of the last sign of life of an attempt, s; 0 without one."""
    try:
        return (log_dir / HEARTBEAT_FILE).stat().st_mtime
    except OSError:
        return 0.0

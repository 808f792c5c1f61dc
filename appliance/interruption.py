"""A signal while there is no run yet: a word and exit code 130. A run has handlers of its own (run/supervise.py)."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

CODE = 130


@contextlib.contextmanager
def told_interruptions() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP inside the block end it with SystemExit, and are told.

    A SIGHUP that is ignored (nohup) stays ignored. Call it from the main thread.
    """
    names: list[str] = []

    def take(number: int, frame: FrameType | None) -> None:
        names.append(signal.Signals(number).name)
        # Not KeyboardInterrupt: after one in an `exec`, as dataclasses have, Python ends by SIGINT.
        raise SystemExit(CODE)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, take)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if names:
            from appliance import console

            console.say(f"stopped by {names[0]}, there was nothing to save")

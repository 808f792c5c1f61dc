"""A signal while nothing runs: a word and an exit code. A run's attempt has handlers of its own (run/supervise.py)."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

_INTERRUPTED = 130
_SAVED = 75  # a promise: another attempt goes on from what is saved


@contextlib.contextmanager
def told_interruptions(saved_step: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP inside the block end it with SystemExit, and are told.

    saved_step: the newest step of the run that is saved, 0 where there is none.  A SIGHUP that is ignored (nohup) stays
    ignored. One such block may be in another one. Call it from the main thread.
    """
    said: list[str] = []

    def take(number: int, frame: FrameType | None) -> None:
        name, step = signal.Signals(number).name, saved_step()
        said.append(stopped_by(name, saved_step=step))
        # Not KeyboardInterrupt: after one in an `exec`, as dataclasses have, Python ends by SIGINT.
        raise SystemExit(code_of(name, saved_step=step))

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, take)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if said:
            from appliance import console

            console.say(said[0])


def stopped_by(name: str, *, saved_step: int) -> str:
    """One line. name: of the signal.  saved_step: 0 for none."""
    kept = f"the state after step {saved_step} is saved" if saved_step else "there was nothing to save"
    return f"stopped by {name}, {kept}"


def code_of(name: str, *, saved_step: int) -> int:
    """The exit code. Parameters as of stopped_by."""
    return _SAVED if saved_step and name != "SIGINT" else _INTERRUPTED

"""SIGINT, SIGTERM and SIGHUP: collected while a run's child works, and a word and an exit code while nothing runs."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

from appliance.errors import Interrupted, SavedAndStopped

SAME_SIGNAL_S = 0.2  # `timeout` and others signal a process and then its group: that is one request, not two
_THAT_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def handle_signals(take: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Give the signals that come inside the block to `take`. A SIGHUP that is ignored (nohup) stays ignored. Call it
    from the main thread."""
    before = {number: signal.getsignal(number) for number in _THAT_END}
    for number, handler in before.items():
        if number != signal.SIGHUP or handler != signal.SIG_IGN:
            signal.signal(number, take)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interrupts(contextlib.ExitStack):
    """Collects the signals while it is entered, by name and in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._heard_at = 0.0

    def __enter__(self) -> Interrupts:
        self.enter_context(handle_signals(self._take))
        return self

    def _take(self, number: int, frame: FrameType | None) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if self.names[-1:] != [name] or now > self._heard_at + SAME_SIGNAL_S:
            self.names.append(name)
            self._heard_at = now


@contextlib.contextmanager
def report_interruptions(saved_step: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Report a signal inside the block and end it with SystemExit. saved_step: the newest step of the run that is
    saved, 0 where there is none.  One such block may be in another one."""
    signal_lines: list[str] = []

    def take(number: int, frame: FrameType | None) -> None:
        name, step = signal.Signals(number).name, saved_step()
        signal_lines.append(stopped_by(name, saved_step=step))
        # Not KeyboardInterrupt: after one in an `exec`, as dataclasses have, Python ends by SIGINT.
        raise SystemExit(code_of(name, saved_step=step))

    try:
        with handle_signals(take):
            yield
    finally:
        if signal_lines:
            from appliance import console

            console.say(signal_lines[0])


def stopped_by(name: str, *, saved_step: int) -> str:
    """Return one line about the signal. name: of the signal.  saved_step: 0 for none."""
    kept = f"the state after step {saved_step} is saved" if saved_step else "there was nothing to save"
    return f"stopped by {name}, {kept}"


def code_of(name: str, *, saved_step: int) -> int:
    """Return the exit code: another attempt can resume from what is saved, or there is nothing to resume. Parameters as
    of stopped_by."""
    return SavedAndStopped.exit_code if saved_step and name != "SIGINT" else Interrupted.exit_code

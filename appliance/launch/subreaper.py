"""The process between the launcher and its child, there so that nothing of a run outlives it.

It is the parent of last resort of everything below it (subreaper), so whatever the child leaves behind, daemons too, is
found and ended. It follows the launcher: when that is gone, even by SIGKILL, the kernel tells it (parent death signal)
and it ends everything at once. The child in turn cannot outlive the subreaper. Ray's own daemons watch their parents
too; this does not depend on it.

    SIGTERM   end the child politely: SIGTERM, after `grace_s` SIGKILL
    SIGUSR1   end everything at once; also what the kernel sends when the launcher is gone

Standard library only: a small process that lives as long as the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from appliance.processes import end_processes, find_processes

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)
_CANNOT_EXECUTE = 127
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class SubreaperOrder:
    """Order of the launcher, passed as JSON in the subreaper's only argument."""

    argv: tuple[str, ...]
    report: int
    """File descriptor for a SubreaperReport."""
    launcher: int
    """Process id of the launcher."""
    mark: str
    """Variable and value that mark a run's processes, see `processes`."""
    grace_s: float
    patience_s: float
    remove: str
    """A folder that is removed at the end if the launcher is gone and cannot do it, or empty."""


@dataclass(frozen=True)
class SubreaperReport:
    returncode: int
    """Exit code of the child, negative for a signal."""
    ended: tuple[str, ...]
    """Processes that had to be ended."""
    left: tuple[str, ...]
    """Processes that would not end."""

    @staticmethod
    def from_json(text: bytes) -> SubreaperReport:
        raw = json.loads(text)
        return SubreaperReport(raw["returncode"], ended=tuple(raw["ended"]), left=tuple(raw["left"]))


class _Subreaper:
    def __init__(self, order: SubreaperOrder) -> None:
        self._order = order
        self._status: int | None = None
        self._stop_requested = False
        self._kill_at: float | None = None
        self._hurried = False
        self._child = 0

    def keep(self) -> SubreaperReport:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        become_subreaper()
        _die_with(self._order.launcher, signal.SIGUSR1)
        self._child = self._start()
        while self._status is None:
            self._pause(1.0)
            if self._hurried or (self._kill_at is not None and time.monotonic() >= self._kill_at):
                self._send(signal.SIGKILL)
        ended, left = end_processes(
            lambda: find_processes(self._order.mark, below=os.getpid()),
            patience_s=0.0 if self._hurried else self._order.patience_s,
            pause=self._pause,
        )
        self._bury()
        return SubreaperReport(self._status, ended=ended, left=left)

    def _start(self) -> int:
        subreaper = os.getpid()
        child = os.fork()
        if child:
            return child
        try:
            _die_with(subreaper, signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and a program would inherit that
            os.execvp(self._order.argv[0], self._order.argv)
        except OSError as error:
            os.write(2, f"{self._order.argv[0]}: {error.strerror}\n".encode())
        finally:
            os._exit(_CANNOT_EXECUTE)

    def _pause(self, seconds: float) -> bool:
        """Wait for a signal, obey it, bury the dead. Returns whether there is no more time to be patient."""
        if self._kill_at is not None and self._status is None:
            seconds = min(seconds, max(0.01, self._kill_at - time.monotonic()))
        received = signal.sigtimedwait(_SIGNALS, seconds)
        if received is not None and received.si_signo == signal.SIGUSR1:
            self._hurried = True
        if received is not None and received.si_signo == signal.SIGTERM and not self._stop_requested:
            self._stop_requested = True
            self._kill_at = time.monotonic() + self._order.grace_s
            self._send(signal.SIGTERM)
        self._bury()
        return self._hurried

    def _bury(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._child:
                    self._status = os.waitstatus_to_exitcode(status)

    def _send(self, number: signal.Signals) -> None:
        if self._status is None:  # not buried yet: the process id is still the child's
            os.kill(self._child, number)


def become_subreaper() -> None:
    """Have orphans below this process become its children, and not those of process 1."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _die_with(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process the signal when the parent is gone; it may be gone already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def _number(folder: str) -> int | None:
    """Return the number of the folder's inode: which folder of this name it is. None where there is none."""
    try:
        return os.stat(folder).st_ino
    except OSError:
        return None


def main(argument: str) -> int:
    order = SubreaperOrder(**json.loads(argument))
    os.set_inheritable(order.report, False)  # held by a daemon it would keep the launcher waiting
    made = _number(order.remove)
    report = _Subreaper(order).keep()
    if order.remove and os.getppid() != order.launcher and _number(order.remove) == made:  # not the next attempt's
        shutil.rmtree(Path(order.remove), ignore_errors=True)
    with contextlib.suppress(BrokenPipeError):  # nobody is left to hear it
        os.write(order.report, json.dumps(asdict(report)).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

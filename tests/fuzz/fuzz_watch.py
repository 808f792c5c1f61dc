"""What the code under test may do in one case: an audit hook that forbids, and two alarms against a hang.

The interpreter tells the hook of every import, compilation, start of a process, connection and change of a file,
whoever asks for it, also from C. Forbidden are all of them but files in the case's own folder. A hook cannot be taken
back: it is deaf while no case runs.
"""

from __future__ import annotations

import codecs
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

CPU_S = 5.0  # of one case; the slowest takes a tenth of a second
WALL_S = 60.0  # the machine may be busy; a case that waits for something takes for ever

FORBIDDEN = frozenset(
    {
        *("import", "exec", "compile", "marshal.loads", "pickle.find_class", "code.__new__", "ctypes.dlopen"),
        *(
            "subprocess.Popen",
            "os.system",
            "os.exec",
            "os.posix_spawn",
            "os.spawn",
            "os.fork",
            "os.forkpty",
            "pty.spawn",
        ),
        *("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "urllib.Request"),
        *("os.putenv", "os.unsetenv", "os.kill", "os.killpg", "os.chdir", "os.chroot"),
    }
)
CHANGES = frozenset(  # events whose first arguments are paths that change
    {
        *("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"),
        *("os.chown", "os.utime", "os.setxattr", "shutil.rmtree", "shutil.move", "shutil.copyfile", "shutil.copytree"),
    }
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _is_name(source: object) -> bool:
    text = source.decode(errors="replace") if isinstance(source, bytes) else source
    return isinstance(text, str) and text.isidentifier()


for _codec in ("utf-8-sig", *(f"utf-{bits}{order}" for bits in (16, 32) for order in ("", "-le", "-be"))):
    codecs.lookup(_codec)  # json decodes bytes by these, and the first to do so imports the codec


class Forbidden(BaseException):
    """Input made the program do what no input may. No `except Exception` can hide it."""


class Hang(BaseException):
    """A case took longer than any should."""


class _Hook:
    def __init__(self) -> None:
        self.folder: str | None = None  # of the case that runs now
        self.others: frozenset[int] = frozenset()  # threads that were there before it; those that it starts are its own
        self.refusals: list[str] = []
        self.may: frozenset[str] = frozenset()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple) -> None:
        if self.folder is None or threading.get_ident() in self.others:
            return
        if event == "compile" and _is_name(arguments[0]):  # typing's, of a forward reference such as rich has
            return
        if event in FORBIDDEN and event not in self.may:
            self._refuse(f"{event} {arguments[:2]!r:.200}")
        elif event == "open" and self._writes(arguments) and not self._inside(arguments[0]):
            self._refuse(f"open for writing {arguments[0]!r:.200}")
        elif event in CHANGES:
            for path in arguments[:2] if event in ("os.rename", "os.link", "shutil.move") else arguments[:1]:
                if not self._inside(path):
                    self._refuse(f"{event} {path!r:.200}")

    def _refuse(self, what: str) -> None:
        self.refusals.append(what)
        raise Forbidden(what)

    def note(self, unraisable: sys.UnraisableHookArgs) -> None:
        """What a finalizer or a hook of a fork raises, in the case or in a fork of it."""
        self.refusals.append(f"{unraisable.exc_value!r} in {unraisable.object!r:.200}")
        os.write(2, f"{self.refusals[-1]}\n".encode())

    @staticmethod
    def _writes(arguments: tuple) -> bool:
        _, mode, flags = arguments
        return bool(flags & _WRITES) if isinstance(flags, int) else any(letter in (mode or "") for letter in "wxa+")

    def _inside(self, path: object) -> bool:
        """By the real path: a symbolic link in the folder does not lead out of it."""
        if isinstance(path, int):
            return True  # a descriptor that is open already
        real = os.path.realpath(os.fsdecode(path))  # type: ignore[arg-type]
        return real == self.folder or real.startswith(f"{self.folder}{os.sep}")


_HOOK: list[_Hook] = []


@contextmanager
def watching(folder: Path, *, may: frozenset[str] = frozenset()) -> Iterator[None]:
    """Raises Forbidden when the block did something that input may not make it do, Hang when it does not end.

    may: events of FORBIDDEN that are of the program's own doing.
    """
    if not _HOOK:
        _HOOK.append(_Hook())
    hook = _HOOK[0]
    hook.refusals.clear()
    before = {number: signal.signal(number, _hang) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    hook.others = frozenset(sys._current_frames()) - {threading.get_ident()}  # C's own threads are in it too
    hook.folder, hook.may = os.path.realpath(folder), may
    unraisable, sys.unraisablehook = sys.unraisablehook, hook.note  # pytest's compiles, which is forbidden
    try:
        yield
    finally:
        hook.folder = None
        sys.unraisablehook = unraisable
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
    if hook.refusals:  # somebody caught even that
        raise Forbidden("; ".join(hook.refusals))


def forget() -> None:
    """In a fork of the case: what runs there may do what it likes."""
    for hook in _HOOK:
        hook.folder = None


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hang(f"more than {CPU_S:g} s of computing, or {WALL_S:g} s of waiting")

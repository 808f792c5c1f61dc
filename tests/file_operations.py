"""The file operations of a process, each told before it happens: so that a test can end it, or fill its disk."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

# Python's audit events come before, whoever calls; each with the place of its `dir_fd` among its arguments.
_CHANGES = {"os.mkdir": 2, "os.rename": 2, "os.remove": 1, "os.rmdir": 1}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
OPERATIONS = {"read", "create", "write", "fsync", *_CHANGES}
NEED_ROOM = OPERATIONS - {"read", "os.remove", "os.rmdir"}  # may fail on a full disk
_OPEN, _WRITE, _SEND, _FSYNC = io.open, os.write, os.sendfile, os.fsync


class Reach(Protocol):
    def __call__(self, operation: str, path: Path, *, half: Callable[[], object]) -> None:
        """path: absolute, or a bare name that is opened below an open folder.  half: does a part of a write, and of
        everything else nothing.  What this raises the caller of the operation gets."""


def nothing() -> None:
    pass


class FileOperations:
    """From where it is made, for good: `reach` is called before each operation on what lies in `root`."""

    def __init__(self, root: Path, reach: Reach) -> None:
        self._root = f"{root}{os.sep}"
        self._reach = reach
        sys.addaudithook(self._hear)
        io.open, os.write, os.fsync = self._open, self._write, self._fsync
        os.sendfile = self._send  # what shutil copies with

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", *_CHANGES) or isinstance(arguments[0], int) or arguments[0] is None:
            return
        path = os.fsdecode(arguments[0])
        if not os.path.isabs(path) and event in _CHANGES and (folder := arguments[_CHANGES[event]]) >= 0:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        operation = event if event in _CHANGES else "create" if arguments[2] & _WRITING else "read"
        self._tell(operation, path)

    def _tell(self, operation: str, path: str, half: Callable[[], object] = nothing) -> None:
        if path.startswith(self._root) or not os.path.isabs(path):
            self._reach(operation, Path(path), half=half)

    def _open(self, file: Any, mode: str = "r", *others: Any, **named: Any) -> Any:
        opened = _OPEN(file, mode, *others, **named)
        return opened if set(mode) <= set("rbt") or isinstance(file, int) else _Told(opened, self, os.fspath(file))

    def _write(self, descriptor: int, content: bytes) -> int:
        """A full disk takes a part and says how much."""
        half = content[: len(content) // 2]
        path = _path_of(descriptor)
        try:
            self._tell("write", path, lambda: _WRITE(descriptor, half))
        except OSError:
            return len(half)
        return _WRITE(descriptor, content)

    def _send(self, to: int, source: int, offset: int, count: int) -> int:
        left = os.fstat(source).st_size - offset
        self._tell("write", _path_of(to), lambda: _SEND(to, source, offset, left // 2))
        return _SEND(to, source, offset, count)

    def _fsync(self, file: Any) -> None:
        self._tell("fsync", _path_of(file if isinstance(file, int) else file.fileno()))
        _FSYNC(file)

    def write(self, file: Any, path: str, content: Any) -> int:
        def half() -> None:
            file.write(content[: len(content) // 2])
            file.flush()

        self._tell("write", path, half)
        return file.write(content)


class _Told:
    """A file that is open for writing."""

    def __init__(self, file: Any, operations: FileOperations, path: str) -> None:
        self._file, self._operations, self._path = file, operations, path

    def __enter__(self) -> _Told:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, content: Any) -> int:
        return self._operations.write(self._file, self._path, content)


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")

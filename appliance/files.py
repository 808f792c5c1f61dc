"""Files and folders that appear whole or not at all: to whoever looks, and after a crash of this program or its host.

Until it is whole, what is written has a hidden name beside its own; one rename then gives it its name. What is written
in JSON by one process and read by another is a `Frozen`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import os
import platform
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_REFUSED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def is_full(error: BaseException) -> bool:
    """Tell whether something could not be written for want of space. safetensors' errors, and Ray's, have no number."""
    said = any(os.strerror(number) in str(error) for number in _FULL)
    return said or getattr(error, "errno", None) in _FULL


def is_refused(error: BaseException) -> bool:
    """Tell whether something may not be written, by its rights or because its file system is read-only."""
    return getattr(error, "errno", None) in _REFUSED


def digest_of(path: Path) -> str:
    """Compute the SHA-256 of a file, 64 hex digits; empty where it cannot be read, or is no file: a pipe might be read
    for ever."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):
        return ""


def write_whole(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Make or replace a file. Parameters, and what it raises, as of `whole_file`."""
    with whole_file(path, durable=durable) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def whole_file(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Give the name to write to, which becomes `path` when the block ends well, and is removed when it does not.

    durable: whether name and content are on the disk at return; false suits files that are useless after a crash of the
    host, or are made again: such a file may then be empty.  Raises OSError.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")  # containers may share a folder
    try:
        yield partial
        if durable:
            sync_to_disk(partial)
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):  # renamed it is not there; any other refusal is reported where it happens
            partial.unlink()
    if durable:
        sync_to_disk(path.parent)


@contextlib.contextmanager
def whole_folder(target: Path, *, for_cache: bool = False) -> Iterator[Path]:
    """Give an empty folder to fill, which becomes `target` when the block ends well, and is removed when it does not.

    for_cache: whether `target` is in a cache: where another process was first, its folder stays and is as good, and
    what processes that were killed left of this target is removed.  Raises OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = partial_prefix(target)
    if for_cache:
        prefix = f"{prefix}{_host()}-"
        _remove_abandoned_folders(prefix, parent=target.parent)
    with _new_folder(prefix, parent=target.parent) as folder:
        yield folder
        for path in (*folder.rglob("*"), folder):  # mkdtemp and safetensors make them private; these may be shared
            path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o644))
            sync_to_disk(path)
        try:
            folder.rename(target)
        except OSError:  # there is one that is not empty
            if not (for_cache and target.is_dir()):
                raise
        sync_to_disk(target.parent)


@contextlib.contextmanager
def working_folder(prefix: str, *, cache: Path) -> Iterator[Path]:
    """Give an empty folder in a folder of the cache, which is removed at the end; so is what processes that were killed
    left of the same prefix.  Raises OSError."""
    prefix = f"{prefix}{_host()}-"
    _remove_abandoned_folders(prefix, parent=cache)
    with _new_folder(prefix, parent=cache) as folder:
        yield folder


def _host() -> str:
    """Return this host's name, as a part of a file's: locks of other hosts may not be seen here."""
    return re.sub(r"[^A-Za-z0-9]+", "_", platform.node())


@contextlib.contextmanager
def _new_folder(prefix: str, *, parent: Path) -> Iterator[Path]:
    """Make a temporary folder that its maker holds locked; the kernel releases the lock when that process ends, however
    it ends."""
    folder, descriptor = _make_locked(prefix, parent=parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # renamed it is not there
        os.close(descriptor)


def _make_locked(prefix: str, *, parent: Path) -> tuple[Path, int]:
    """Return a new folder, and the descriptor that has the lock. Another process may remove it before it is locked:
    then there is another one. Raises OSError."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder, descriptor
        os.close(descriptor)


def _remove_abandoned_folders(prefix: str, *, parent: Path) -> None:
    """Remove the folders of this prefix whose makers have ended: those that can be locked. The prefix names this host:
    a lock of another one may not be seen here, and versions before this one took none. Where the file system cannot
    lock folders (NFS), nothing is removed."""
    for folder in parent.glob(f"{glob.escape(prefix)}*"):
        _remove_unless_locked(folder)


def _remove_unless_locked(folder: Path) -> None:
    """Remove a folder whose maker has ended; nothing where it cannot be locked."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # gone by now, no folder, or another user's
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass  # in use, or nothing can be locked there
    finally:
        os.close(descriptor)


def partial_prefix(target: Path) -> str:
    """Return how the name of a folder begins that is to become `target`: what a process that was killed leaves
    behind."""
    return f".{target.name}-"


def sync_to_disk(path: Path) -> None:
    """Bring a file's content, or the names in a folder, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Frozen(BaseModel):
    """A model that is frozen, takes no extra fields and coerces nothing (the text `3` is not the number 3)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def replace(self, **changes: object) -> Self:
        """Return a copy with these fields changed, checked as a new one is."""
        return self.model_validate({**dict(self), **changes})

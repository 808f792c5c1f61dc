"""Which image the container tests use, and folders that its user reads and writes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

IMAGE = "flashrl-appliance:cpu"
USER = 10001


def open_to_all(folder: Path) -> None:
    """Let every user walk to a folder of pytest's, which makes them for its own user alone."""
    for each in (folder, *folder.parents[:2]):
        each.chmod(0o755)


def give_to(user: int, folder: Path) -> None:
    """Make `user`, in group 0, the owner of a folder and of all that is in it."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user, 0)


def runs_with(cache: Path, folder: Path, *, user: int = USER) -> Path:
    """A new folder of runs of that user, with a copy of the cache."""
    shutil.copytree(cache, folder / ".cache")
    give_to(user, folder)
    open_to_all(folder.parent)
    return folder

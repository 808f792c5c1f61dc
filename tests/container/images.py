"""Which image the container tests use, and folders that its user reads and writes."""

from __future__ import annotations

from pathlib import Path

IMAGE = "flashrl-appliance:cpu"
USER = 10001


def open_to_all(folder: Path) -> None:
    """Let every user walk to a folder of pytest's, which makes them for its own user alone."""
    for each in (folder, *folder.parents[:2]):
        each.chmod(0o755)

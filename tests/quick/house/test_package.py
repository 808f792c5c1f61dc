"""What is installed: every file of the package, not only Python's, and no more of them than a newcomer can survey."""

from __future__ import annotations

import fnmatch
import subprocess
import tomllib
from pathlib import Path

MOST_FILES = 247  # a function with one caller in the same folder needs no file of its own
GROWING = ("appliance/corrections/", "appliance/tasks/built_in/", "appliance/quant/codec_", "appliance/engine/")


def tracked(root: Path) -> list[str]:
    listed = subprocess.run(["git", "ls-files", "appliance"], cwd=root, capture_output=True, text=True, check=True)
    return listed.stdout.split()


def test_the_package_has_few_files(root: Path) -> None:
    """But for those that docs/extending.md tells to add."""
    assert 100 < sum(not file.startswith(GROWING) for file in tracked(root)) <= MOST_FILES


def test_files_that_are_not_python_are_package_data(root: Path) -> None:
    setuptools = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = [
        f"{package.replace('.', '/')}/{pattern}"
        for package, names in setuptools["package-data"].items()
        for pattern in names
    ]
    others = [file for file in tracked(root) if not file.endswith(".py")]
    assert others
    assert [file for file in others if not any(fnmatch.fnmatch(file, each) for each in patterns)] == []

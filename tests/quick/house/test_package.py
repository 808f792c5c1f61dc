"""What is installed: every file of the package, not only Python's."""

from __future__ import annotations

import fnmatch
import subprocess
import tomllib
from pathlib import Path


def test_files_that_are_not_python_are_package_data(root: Path) -> None:
    setuptools = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = [
        f"{package.replace('.', '/')}/{pattern}"
        for package, names in setuptools["package-data"].items()
        for pattern in names
    ]
    listed = subprocess.run(["git", "ls-files", "appliance"], cwd=root, capture_output=True, text=True, check=True)
    others = [file for file in listed.stdout.split() if not file.endswith(".py")]
    assert others
    assert [file for file in others if not any(fnmatch.fnmatch(file, each) for each in patterns)] == []

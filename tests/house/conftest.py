"""The repository as the house tests see it: its folder and its modules. And pytest on tests of their own."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def modules() -> dict[str, ast.Module]:
    """Name below `appliance`, such as `plan.model`, to its syntax tree. A package's own file is `plan.__init__`."""
    package = ROOT / "appliance"
    files = sorted(package.rglob("*.py"))
    return {".".join(f.relative_to(package).with_suffix("").parts): ast.parse(f.read_text()) for f in files}


@pytest.fixture(scope="session")
def two_workers(root: Path) -> tuple[str, ...]:
    """The options by which `make test` runs two files at a time."""
    return tuple(re.search(r"^TWO_WORKERS := (.+)$", (root / "Makefile").read_text(), re.M)[1].split())


@pytest.fixture
def run_pytest(root: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """pytest, our `tests/conftest.py` and no plugins but that for workers, on other tests: file below tests to text."""

    def run(files: dict[str, str], *options: str, skips: str = "") -> subprocess.CompletedProcess[str]:
        for name, text in {**files, "skips.txt": skips}.items():
            file = tmp_path / "tests" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        for name in ("conftest.py", "two_workers.py"):
            shutil.copy(root / "tests" / name, tmp_path / "tests")
        plugins = ("-p", "no:cacheprovider", "-p", "xdist")
        command = [sys.executable, "-m", "pytest", "--rootdir", ".", *plugins, *options, "tests"]
        environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    return run

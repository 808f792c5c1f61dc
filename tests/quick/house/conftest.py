"""The repository as the house tests see it: its folder and its modules."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def modules() -> dict[str, ast.Module]:
    """Name below `appliance`, such as `plan.model`, to its syntax tree. A package's own file is `plan.__init__`."""
    package = ROOT / "appliance"
    files = sorted(package.rglob("*.py"))
    return {".".join(f.relative_to(package).with_suffix("").parts): ast.parse(f.read_text()) for f in files}

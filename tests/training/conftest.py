"""Runs that are killed. `killable.py` beside this file holds what the tests share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from killable import SMALL, Run


@pytest.fixture(scope="session")
def run_root(tmp_path_factory: pytest.TempPathFactory, with_tiny_cache: Callable[[Path], Path]) -> Path:
    return with_tiny_cache(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def new_run(run_root: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(name: str, **sets: str) -> Run:
        own = {key.replace("__", "."): value for key, value in sets.items()}
        runs.append(Run(run_root, name, {**SMALL, **own}))
        return runs[-1]

    yield make
    for run in runs:
        run.clean_up()

"""`pytest -n 2`, two workers: which of them runs which files, what is made once for both, and what they tell the one
that reports.

A worker collects all tests and runs a part of them; the one that reports collects and runs none.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from filelock import FileLock
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch: threads of two workers on two cores wait more than they compute
    os.environ["OMP_NUM_THREADS"] = "1"

TOGETHER = "tests/fuzz/"  # one worker runs all of it: its last file counts the cases of the others
TOLD = pytest.StashKey[dict[str, Any]]()

Made = TypeVar("Made")


class FromBothEnds(LoadFileScheduling):
    """Whole files: the first worker takes them from the front, the other one from the back, until they meet.

    In front are the trainings, which wait for each other's processes half of their time, at the back is what only
    computes. So one fills the pauses of the other, and two trainings, 4 GB each, are seldom there at once.
    """

    def _split_scope(self, nodeid: str) -> str:
        return TOGETHER if nodeid.startswith(TOGETHER) else super()._split_scope(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        if node.gateway.id != "gw0":
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


def trainings_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """By file: those with trainings, the longest one first, so that short ones are left where the workers meet; those
    with engines; and the others. Each in the order that they had."""
    marks: dict[Path, dict[str, pytest.Mark]] = {}
    for item in items:
        marks.setdefault(item.path, {}).update((mark.name, mark) for mark in item.iter_markers())

    def place(item: pytest.Item) -> tuple[float, bool]:
        found = marks[item.path]
        minutes = found["e2e"].kwargs.get("minutes", 1) if "e2e" in found else 0
        return -minutes, "engine" not in found

    return sorted(items, key=place)


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def tell(config: pytest.Config, **facts: int | list[str]) -> None:
    """Leave something for the summary at the end, which another process writes when there are workers."""
    told = config.workeroutput if is_worker(config) else config.stash.setdefault(TOLD, {})
    told.update(facts)


def folder_of_all(factory: pytest.TempPathFactory, config: pytest.Config) -> Path:
    """A temporary folder that the workers of this run share."""
    own = factory.getbasetemp()
    return own.parent if is_worker(config) else own


def once(file: Path, make: Callable[[], Made]) -> Made:
    """What `make` returns. The worker that asks first makes it and keeps it in the file, the other one waits for it."""
    with FileLock(f"{file}.lock"):
        if not file.exists():
            file.write_bytes(pickle.dumps(make()))
        return pickle.loads(file.read_bytes())

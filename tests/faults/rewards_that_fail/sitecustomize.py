"""With this folder on PYTHONPATH the reward function of a training fails whenever the test asks for it.

Every Python imports a module of this name at its start; only the reward processes do anything here. In the folder that
REWARDS_THAT_FAIL names the test makes a file called by what is to go wrong, and the next response takes it away. With
the file `all` there, every reward raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

LIBRARY = "appliance.tasks.library"


def is_reward_process() -> bool:
    """As multiprocessing starts them; an engine's core is started so too, and does not import the tasks."""
    return "REWARDS_THAT_FAIL" in os.environ and "--multiprocessing-fork" in sys.orig_argv


class FailingRewards(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != LIBRARY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        load = spec.loader.exec_module

        def load_and_spoil(module: ModuleType) -> None:
            load(module)
            module.score = failing(module.score, folder=Path(os.environ["REWARDS_THAT_FAIL"]))

        spec.loader.exec_module = load_and_spoil
        return spec


def failing(score: Callable[..., float], *, folder: Path) -> Callable[..., float]:
    def graded(kind: str, *, response: str, truth: str) -> float:
        if (folder / "all").exists():
            raise ValueError("every reward was asked to fail")
        for what in ("raise", "nan", "hang", "die"):
            try:
                (folder / what).rename(folder / f"{what}-taken")
            except FileNotFoundError:
                continue
            return fail(what, folder=folder)
        return score(kind, response=response, truth=truth)

    return graded


def fail(what: str, *, folder: Path) -> float:
    if what == "raise":
        raise ValueError("this reward was asked to fail")
    if what == "nan":
        return float("nan")
    if what == "die":  # at the test's hand: it knows now that a response is at work here
        (folder / "pid.partial").write_text(str(os.getpid()))
        (folder / "pid.partial").rename(folder / "pid")
    time.sleep(600)
    return 0.0


if is_reward_process():
    sys.meta_path.insert(0, FailingRewards())

"""With this folder and tests/ on PYTHONPATH the reward function of a training fails whenever the test asks for it.

Every Python imports a module of this name at its start; only the reward processes do anything here. In the folder that
REWARDS_THAT_FAIL names the test makes a file called by what is to go wrong, and the next response takes it away. With
the file `all` there, every reward raises.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from after_import import after_import

GRADING = "appliance.tasks.grading"


def is_reward_process() -> bool:
    """As multiprocessing starts them; an engine's core is started so too, and does not import the tasks."""
    return "REWARDS_THAT_FAIL" in os.environ and "--multiprocessing-fork" in sys.orig_argv


def spoil(module: ModuleType) -> None:
    module.grade = failing(module.grade, folder=Path(os.environ["REWARDS_THAT_FAIL"]))


def failing(grade: Callable[..., list], *, folder: Path) -> Callable[..., list]:
    def graded(*arguments: object) -> list:
        if (folder / "all").exists():
            raise ValueError("every reward was asked to fail")
        for fault in ("raise", "nan", "hang", "die"):
            try:
                (folder / fault).rename(folder / f"{fault}-taken")
            except FileNotFoundError:
                continue
            return [("arithmetic", 1.0, fail(fault, folder=folder))]
        return grade(*arguments)

    return graded


def fail(fault: str, *, folder: Path) -> float:
    if fault == "raise":
        raise ValueError("this reward was asked to fail")
    if fault == "nan":
        return float("nan")
    if fault == "die":  # at the test's hand: it knows now that a response is at work here
        (folder / "pid.partial").write_text(str(os.getpid()))
        (folder / "pid.partial").rename(folder / "pid")
    time.sleep(600)
    return 0.0


if is_reward_process():
    after_import(GRADING, spoil)

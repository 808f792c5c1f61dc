"""With this folder and tests/ on PYTHONPATH the save of a training is killed at the operation that the test chooses.

The test writes it into the file `at` in the folder that KILLED_IN_A_SAVE names; the process that comes to it renames
the file to `taken`, does half of it where it is a write, and is gone. What anybody came to is a line of `passed`.
An operation reads `driver write partial-global_step_N/state.json`: the process, what it does in the words of
`file_operations.py` or `torch.save`, and where below the folder of checkpoints that KILLED_IN_A_SAVE_OF names.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from after_import import after_import
from file_operations import FileOperations

# Loaded before a save by the driver and by the training worker of each rank.
OF_A_SAVE = {"driver": "appliance.trainer.checkpoints", "rank": "verl.utils.checkpoint.fsdp_checkpoint_manager"}


_STARTED = os.getpid()


def who() -> str:
    """A rank may be a fork of the driver, with its arguments."""
    return "driver" if "appliance.trainer.entry" in sys.orig_argv and os.getpid() == _STARTED else "rank"


class Points:
    def __init__(self, folder: Path, *, checkpoints: Path) -> None:
        self._folder, self._checkpoints = folder, checkpoints
        self._passed = os.open(folder / "passed", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._write = os.write  # as it is before it is told
        FileOperations(checkpoints, self.reach)

    def reach(self, operation: str, path: Path, *, half: Callable[[], object]) -> None:
        if not path.is_absolute():
            return
        place = re.sub(r"global_step_\d+", "global_step_N", str(path.relative_to(self._checkpoints)))
        place = re.sub(r"\.\d+-[0-9a-f]{8}$", "", place)  # a file that is not whole yet: process, number
        point = f"{who()} {operation} {place}"
        self._write(self._passed, f"{point}\n".encode())
        at = self._folder / "at"
        try:
            if at.read_text() != point:
                return
            at.rename(self._folder / "taken")
        except FileNotFoundError:
            return
        half()
        os.kill(os.getpid(), signal.SIGKILL)


def watch(_: ModuleType) -> None:
    import torch  # is loaded: that of checkpoints imports it

    checkpoints = Path(os.environ["KILLED_IN_A_SAVE_OF"])
    points = Points(Path(os.environ["KILLED_IN_A_SAVE"]), checkpoints=checkpoints)
    save = torch.save  # writes by C++, of which Python hears nothing

    def save_or_die(content: Any, path: Any, *others: Any, **options: Any) -> None:
        if isinstance(path, str | Path) and Path(path).is_relative_to(checkpoints):

            def half() -> None:
                save(content, path, *others, **options)
                os.truncate(path, os.path.getsize(path) // 2)

            points.reach("torch.save", Path(path), half=half)
        save(content, path, *others, **options)

    torch.save = save_or_die


if "KILLED_IN_A_SAVE" in os.environ:
    after_import(OF_A_SAVE[who()], watch)

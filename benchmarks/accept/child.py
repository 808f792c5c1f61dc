"""The process of one row: `-m benchmarks.accept.child ROW MODULE:FUNCTION ARGUMENTS FOLDER gpu|cpu`, the arguments as
JSON. What it prints goes to the row's log.

It ends with 0 whatever the row found: what it found is in its file. After an error of CUDA after which nothing runs
in a process it ends with LOST, and is started again for the parts of the row that have not run.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from appliance.record.liveness import keep_stacks
from benchmarks.accept.ground import DeviceLost, Ground, failure_text, lack_of
from benchmarks.accept.outcome import State

LOST = 97


def main() -> int:
    name, code, arguments, folder, device = sys.argv[1:]
    keep_stacks("row")
    ground = Ground(row=name, folder=Path(folder), rehearsal=device == "cpu")
    ground.take_over_outcome()
    try:
        run(ground, code=code, arguments=json.loads(arguments))
    except DeviceLost:
        sys.stdout.flush()
        os._exit(LOST)  # what ends a process in order asks the device again
    return 0


def run(ground: Ground, *, code: str, arguments: dict[str, Any]) -> None:
    """Raises DeviceLost where parts of the row are left to run."""
    ground.write(State.RUNNING)
    module, _, function = code.partition(":")
    try:
        getattr(importlib.import_module(module), function)(ground, **arguments)
    except DeviceLost:
        raise
    except Exception as error:  # the boundary: whatever a kernel, a library or a typo of ours can raise ends one row
        if lack := lack_of(error):
            ground.write(State.SKIPPED, why=lack)
        else:
            traceback.print_exc()
            ground.write(State.FAILED, why=failure_text(error))
    else:
        nothing = "" if ground.checks else "nothing was compared with anything"
        ground.write(State.FAILED if nothing else State.PASSED, why=nothing)


if __name__ == "__main__":
    sys.exit(main())

"""What failed in an engine's process, said where it failed.

vLLM sends only the text of an error to whoever called, and of an error at start-up not even that; the kind, the hint
and the exit code would be lost on the way to the launcher.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from appliance.errors import ApplianceError
from appliance.plan.env import PLAN_VARIABLE
from appliance.run.events import append_failure


@contextmanager
def said_failures() -> Iterator[None]:
    """An error of ours inside the block becomes a `failure` event of the run this process belongs to, and goes on."""
    try:
        yield
    except ApplianceError as error:
        if PLAN_VARIABLE in os.environ:
            append_failure(Path(os.environ[PLAN_VARIABLE]).parent, error)
        raise

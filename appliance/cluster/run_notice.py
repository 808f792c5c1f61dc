"""What a node that joined learns of the training it works for: where its run is, and from there how it ended.

A head that ended its training and one that was killed look the same on the network. The run's folder is on a file
system that every node shares, and its run.json tells them apart.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic.dataclasses import dataclass

from appliance.files import write_whole
from appliance.record.lines import STRICT, as_json, read
from appliance.record.session import RunRecord, RunStatus, read_record
from appliance.terms.environment import NODE_VARIABLE

NOTICE_FILE = "training.json"


@dataclass(frozen=True, config=STRICT)
class RunNotice:
    """attempt: of the run, when this node became part of it."""

    run_dir: Path
    attempt: int


def write_notice(run_dir: Path) -> None:
    """On a node, in a process of Ray's: tell `join` what its node is for. Elsewhere, and without a run there: nothing.

    Raises OSError when it cannot be written.
    """
    folder, record = os.environ.get(NODE_VARIABLE), record_of(run_dir)
    if folder and record is not None:
        write_whole(Path(folder) / NOTICE_FILE, as_json(RunNotice(run_dir, record.attempt)), durable=False)


def read_notice(folder: Path) -> RunNotice | None:
    """None before there are any. Raises OSError, ValueError."""
    file = folder / NOTICE_FILE
    return read(file, RunNotice) if file.exists() else None


def record_of(run_dir: Path) -> RunRecord | None:
    """The run's run.json; None where there is none, or none that can be read just now."""
    try:
        return read_record(run_dir)
    except (OSError, ValueError):
        return None


def end_of(training: RunNotice) -> RunRecord | None:
    """How that attempt ended, None while it goes on, and when nobody has written it."""
    record = record_of(training.run_dir)
    if record is None or record.attempt != training.attempt or record.state in (RunStatus.STARTING, RunStatus.RUNNING):
        return None
    return record


def is_resumed(training: RunNotice) -> bool:
    """Whether the run has a newer attempt than the one that this node was part of."""
    record = record_of(training.run_dir)
    return record is not None and record.attempt > training.attempt

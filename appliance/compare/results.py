"""What the runs of a comparison left in their folders, read back as values."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from appliance.compare.arms import PlannedRun
from appliance.compare.existing import has_result
from appliance.corrections.registry import CorrectionMethod
from appliance.files import write_whole
from appliance.record.events import Event, StepMetrics, append_event, read_events, read_metrics
from appliance.record.lines import finite, json_object
from appliance.record.session import RunRecord, read_record

FINAL_FILE = "final-validation.json"
_LOAD = "load"
_BUSY = 0.1  # of all cores, before the start
_LOOK_S = 3.0


@dataclass(frozen=True)
class RunResult:
    """One run. rewards: of the final validation in BF16, problem by problem, empty where there is no model.

    steps: each once; a validation before training has no reward.
    seconds: of its attempts, each from its first event to its last; pauses between them do not count.
    busy: share of the cores that others kept busy before it started, None: not known.
    """

    arm: str
    seed: int
    folder: str
    method: CorrectionMethod
    state: str
    reason: str
    steps: tuple[StepMetrics, ...]
    rewards: tuple[float, ...]
    seconds: float
    busy: float | None

    @property
    def final(self) -> float | None:
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def is_busy(self) -> bool:
        """Whether other work was on the machine, so that its times are no measurements."""
        return self.busy is None or self.busy > _BUSY


def read_result(run: PlannedRun) -> RunResult | None:
    """None where the run has no result yet."""
    try:
        record = read_record(run.run_dir)
    except (OSError, ValueError):
        return None
    return _result(run, record=record) if has_result(record) else None


def _result(run: PlannedRun, *, record: RunRecord) -> RunResult:
    events = read_events(run.run_dir)
    shares = [finite(json_object(event.line).get("share")) for event in events if event.kind == _LOAD]
    return RunResult(
        arm=run.arm,
        seed=run.seed,
        folder=run.run_dir.name,
        method=run.plan.correction.method,
        state=str(record.state),
        reason=record.reason,
        steps=read_metrics(run.run_dir),
        rewards=read_final(run.run_dir),
        seconds=_seconds([event for event in events if event.kind != _LOAD]),  # written when the run was over
        busy=shares[-1] if shares else None,
    )


def _seconds(events: Sequence[Event]) -> float:
    starts = [0, *(place for place, event in enumerate(events) if event.kind == "resume"), len(events)]
    attempts = [events[start:end] for start, end in itertools.pairwise(starts) if start < end]
    return sum(attempt[-1].time - attempt[0].time for attempt in attempts)


def note_busy(run_dir: Path, *, share: float) -> None:
    """Write into a run's events how busy others kept the machine before it. share: of all cores, 0..1."""
    append_event(
        run_dir, kind=_LOAD, what=f"{share:.0%} of the cores were busy before the start", share=round(share, 3)
    )


def busy_share() -> float:
    """Share of all cores that are busy now, 0..1, over a few seconds. No load average: that of the last minute has the
    run before in it."""
    return psutil.cpu_percent(interval=_LOOK_S) / 100


def write_final(run_dir: Path, rewards: list[float]) -> None:
    """The rewards of the final validation, in the order of the problems. Appears whole or not at all."""
    write_whole(run_dir / FINAL_FILE, json.dumps({"schema_version": 1, "scheme": "bf16", "rewards": rewards}) + "\n")


def read_final(run_dir: Path) -> tuple[float, ...]:
    try:
        raw = json.loads((run_dir / FINAL_FILE).read_text())
    except (OSError, ValueError):
        return ()
    return tuple(float(each) for each in raw["rewards"])

"""What the runs of a comparison left in their folders, read back as values."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from appliance.compare.arms import PlannedRun
from appliance.compare.existing import has_result
from appliance.quant.correction import CorrectionMethod
from appliance.run.events import EVENTS_FILE, METRICS_FILE, append_event
from appliance.run.session import RunRecord, read_record

FINAL_FILE = "final-validation.json"
_LOAD = "load"
_BUSY = 0.1  # of all cores, before the start
_LOOK_S = 3.0


@dataclass(frozen=True)
class StepRow:
    """The part of a step's metrics that a comparison shows; None where a step has none. Units as in metrics.jsonl."""

    step: int
    reward: float | None
    k3_kl: float | None
    truncated: float | None
    weight_max: float | None
    codes_changed: float | None
    step_s: float | None
    validation: float | None
    scheme: str


@dataclass(frozen=True)
class RunResult:
    """One run. rewards: of the final validation in BF16, problem by problem, empty where there is no model.

    seconds: of its attempts, each from its first event to its last; pauses between them do not count.
    busy: share of the cores that others kept busy before it started, None: not known.
    """

    arm: str
    seed: int
    folder: str
    method: CorrectionMethod
    state: str
    reason: str
    steps: tuple[StepRow, ...]
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
    events = _objects(run.run_dir / EVENTS_FILE)
    shares = [_number(event.get("share")) for event in events if event.get("kind") == _LOAD]
    return RunResult(
        arm=run.arm,
        seed=run.seed,
        folder=run.run_dir.name,
        method=run.plan.correction.method,
        state=str(record.state),
        reason=record.reason,
        steps=_steps(run.run_dir / METRICS_FILE),
        rewards=read_final(run.run_dir),
        seconds=_seconds(events),
        busy=shares[-1] if shares else None,
    )


def _seconds(events: list[dict[str, Any]]) -> float:
    total, begun, last = 0.0, None, 0.0
    for event in events:
        time_s = _number(event.get("time"))
        if time_s is None or event.get("kind") == _LOAD:  # written when the run was over
            continue
        if event.get("kind") == "resume" and begun is not None:
            total, begun = total + last - begun, None
        begun, last = time_s if begun is None else begun, time_s
    return total if begun is None else total + last - begun


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
    partial = run_dir / f".{FINAL_FILE}.{os.getpid()}"
    partial.write_text(json.dumps({"schema_version": 1, "scheme": "bf16", "rewards": rewards}) + "\n")
    partial.replace(run_dir / FINAL_FILE)


def read_final(run_dir: Path) -> tuple[float, ...]:
    try:
        raw = json.loads((run_dir / FINAL_FILE).read_text())
    except (OSError, ValueError):
        return ()
    return tuple(float(each) for each in raw["rewards"])


def _steps(path: Path) -> tuple[StepRow, ...]:
    """Each step once: where a run was resumed its later line holds. A validation before training has no reward."""
    rows = {int(line["step"]): _row(line) for line in _objects(path) if _number(line.get("step")) is not None}
    return tuple(rows[step] for step in sorted(rows))


def _row(line: dict[str, Any]) -> StepRow:
    return StepRow(
        step=int(line["step"]),
        reward=_number(line.get("reward_mean")),
        k3_kl=_number(line.get("mismatch_k3_kl")),
        truncated=_number(line.get("is_truncated_fraction")),
        weight_max=_number(line.get("is_weight_max")),
        codes_changed=_number(line.get("codes_changed_fraction")),
        step_s=_number(line.get("step_s")),
        validation=_number(line.get("val_reward_mean")),
        scheme=str(line.get("scheme", "")),
    )


def _objects(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for line in lines:
        try:
            raw = json.loads(line)
        except ValueError:  # the last line of a run that was killed
            continue
        if isinstance(raw, dict):
            found.append(raw)
    return found


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)

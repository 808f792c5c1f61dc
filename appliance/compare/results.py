"""What the runs of a comparison left in their folders, read back as values."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.compare.arms import PlannedRun
from appliance.compare.found import has_result
from appliance.quant.correction import CorrectionMethod
from appliance.run.events import EVENTS_FILE, METRICS_FILE, append_event
from appliance.run.session import RunRecord, read_record

FINAL_FILE = "final-validation.json"
_LOAD = "load"
_BUSY = 0.5  # load average before the start, per core


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

    seconds: from its first event to its last.  load: the load average per core before it started, None: not known.
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
    load: float | None

    @property
    def final(self) -> float | None:
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def is_busy(self) -> bool:
        """Whether other work was on the machine, so that its times are no measurements."""
        return self.load is None or self.load > _BUSY


def read_result(run: PlannedRun) -> RunResult | None:
    """None where the run has no result yet."""
    try:
        record = read_record(run.run_dir)
    except (OSError, ValueError):
        return None
    return _result(run, record=record) if has_result(record) else None


def _result(run: PlannedRun, *, record: RunRecord) -> RunResult:
    events = _objects(run.run_dir / EVENTS_FILE)
    times = [event["time"] for event in events if _number(event.get("time")) is not None]
    loads = [event["per_core"] for event in events if event.get("kind") == _LOAD]
    return RunResult(
        arm=run.arm,
        seed=run.seed,
        folder=run.run_dir.name,
        method=run.plan.correction.method,
        state=str(record.state),
        reason=record.reason,
        steps=_steps(run.run_dir / METRICS_FILE),
        rewards=read_final(run.run_dir),
        seconds=max(times, default=0.0) - min(times, default=0.0),
        load=loads[-1] if loads else None,
    )


def note_load(run_dir: Path, *, per_core: float) -> None:
    """Write into a run's events how busy the machine was before it. per_core: load average by cores."""
    what = f"load average before the start: {per_core:.2f} per core"
    append_event(run_dir, kind=_LOAD, what=what, per_core=round(per_core, 3))


def load_per_core() -> float:
    return os.getloadavg()[0] / (os.cpu_count() or 1)


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

"""The line of the last step, where a stop cut the validation that belongs into it: the next attempt makes it again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from appliance.record.checkpoints import step_of
from appliance.record.events import METRICS_FILE, parse_metrics
from appliance.record.plan import RunPlan

STATE_FILE = "state.json"  # the driver's part of a checkpoint; "line": what metrics.jsonl got of its step


def owed_line(run_dir: Path, *, checkpoint: Path | None, plan: RunPlan) -> dict[str, Any] | None:
    """The last step's line as its checkpoint has it, when its validation is due and nowhere written; else None.

    checkpoint: where the run goes on.  Raises OSError and ValueError when its state cannot be read.
    """
    if checkpoint is None or step_of(checkpoint) != plan.steps or not plan.validate_every:
        return None
    line = json.loads((checkpoint / STATE_FILE).read_text()).get("line")
    if not line or line.get("val_reward_mean") is not None:
        return None
    metrics = run_dir / METRICS_FILE
    lines = map(parse_metrics, metrics.read_text().splitlines() if metrics.exists() else ())
    validated = any(each and each.step == plan.steps and each.val_reward_mean is not None for each in lines)
    return None if validated else line

"""Does the data fit its reward? A few problems are graded in a child, as the training will grade them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

from appliance.plan.model import RunPlan
from appliance.tasks.sample import Sample

_STARTS_WITHIN_S = 60.0


def reward_problem(plan: RunPlan) -> str:
    """What is wrong with the rewards of the first problems; empty where nothing is, or the data is not here yet."""
    task = plan.task
    if task.kind != "arithmetic" and not task.train_file:
        return ""
    sample = Sample(task.kind, file=task.train_file, difficulty=task.difficulty, seed=task.seed)
    within_s = _STARTS_WITHIN_S + task.reward_timeout_s
    try:
        done = subprocess.run(
            [sys.executable, "-m", "appliance.tasks.sample"],
            input=json.dumps(dataclasses.asdict(sample)),
            capture_output=True,
            text=True,
            timeout=within_s,
        )
    except subprocess.TimeoutExpired:
        return f"no reward of the first problems after {within_s:g} s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"the reward function failed: {last}"
    return str(json.loads(done.stdout))

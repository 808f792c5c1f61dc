"""Does the data fit its reward? A few problems are graded in a child, as the training will grade them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import dataclass

from appliance.record.plan import RunPlan
from appliance.tasks.grading import Sample, Verdict
from appliance.tasks.library import is_from_hub

_STARTS_WITHIN_S = 60.0
_SHOWN = 60  # characters


@dataclass(frozen=True)
class RewardProblem:
    """is_rare: of half of the sample at most, so rows that can never be right rather than data of another task."""

    message: str
    is_rare: bool = False


def reward_problem(plan: RunPlan) -> RewardProblem | None:
    """What is wrong with the rewards of the first problems; None where nothing is, or the data is not here yet."""
    task = plan.task
    if is_from_hub(task):
        return None
    sample = Sample(task.kind, file=task.train_file, difficulty=task.difficulty, seed=task.seed)
    within_s = _STARTS_WITHIN_S + task.reward_timeout_s
    try:
        done = subprocess.run(
            [sys.executable, "-m", "appliance.tasks.grading"],
            input=json.dumps(dataclasses.asdict(sample)),
            capture_output=True,
            text=True,
            timeout=within_s,
        )
    except subprocess.TimeoutExpired:
        return RewardProblem(f"no reward of the first problems after {within_s:g} s")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return RewardProblem(f"the reward function failed: {last}")
    return _problem(done.stdout)


def _problem(output: str) -> RewardProblem | None:
    """output: the child's. A library may have printed before its last line, and at the end of its process after it."""
    last = (output.strip().splitlines() or [""])[-1]
    try:
        verdict = Verdict(**json.loads(last))
    except (ValueError, TypeError):
        return RewardProblem(f"the child that grades the first problems ended with `{last[:_SHOWN]}`, not its verdict")
    if not verdict.wrong:
        return None
    message = f"{verdict.wrong} of {verdict.sampled} sampled rewards are wrong: {verdict.first}"
    return RewardProblem(message, is_rare=verdict.wrong * 2 <= verdict.sampled)

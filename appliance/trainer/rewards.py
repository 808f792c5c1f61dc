"""The reward function that verl loads from this file (`reward.custom_reward_function`)."""

from __future__ import annotations

from typing import Any

from appliance.tasks.library import score


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> float:
    """The reward in [0, 1]. data_source: the task's name.  Raises ValueError for a task that we do not have."""
    return score(data_source, response=solution_str, truth=ground_truth)

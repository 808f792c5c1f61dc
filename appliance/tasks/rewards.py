"""The rewards of a task of the user's own, built in by name or in the user's files: only for processes that grade."""

from __future__ import annotations

from collections.abc import Callable

from appliance.record.plan import OwnPlan, RewardPlan
from appliance.tasks.task import Response, Reward
from appliance.tasks.user_code import load_function


def load_rewards(plan: OwnPlan) -> tuple[Reward, ...]:
    """Runs the user's files. Raises what they raise, and RewardError for a function that is none of the three forms."""
    return tuple(Reward(each.name, each.weight, _value(each)) for each in plan.rewards)


def _value(reward: RewardPlan) -> Callable[[Response], object]:
    return load_function(reward.file, reward.function) if reward.file else BUILT_IN[reward.function]


def exact(response: Response) -> float:
    """1.0 when the response is the truth, white space around either ignored."""
    return float(response.text.strip() == response.truth.strip())


BUILT_IN: dict[str, Callable[[Response], float]] = {"exact": exact}

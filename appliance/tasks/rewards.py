"""The rewards of a task of the user's own, built in by name or in the user's files: only for processes that grade."""

from __future__ import annotations

from collections.abc import Callable

from appliance.record.plan import OwnPlan, RewardPlan
from appliance.tasks.task import Response, Reward
from appliance.tasks.user_code import Given, load_function


def load_rewards(plan: OwnPlan, *, given: Given) -> tuple[Reward, ...]:
    """Runs the user's files. Raises what they raise, and UserCodeError for a function that is none of the forms."""
    return tuple(_reward(each, given=given) for each in plan.rewards)


def _reward(reward: RewardPlan, *, given: Given) -> Reward:
    if not reward.file:
        return Reward(reward.name, reward.weight, BUILT_IN[reward.function])
    value = load_function(reward.file, reward.function, given=given)
    return Reward(reward.name, reward.weight, value, place=f"{reward.file}:{reward.function}")


def exact(response: Response) -> float:
    """1.0 when the response is the truth, white space around either ignored."""
    return float(response.text.strip() == response.truth.strip())


BUILT_IN: dict[str, Callable[[Response], float]] = {"exact": exact}

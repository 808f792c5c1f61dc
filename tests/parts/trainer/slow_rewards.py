"""Rewards for a pool's processes, which import this file and no more: neither torch nor verl."""

from __future__ import annotations

import time

from appliance.tasks.task import RewardFunction


def slow_rewards() -> tuple[RewardFunction, ...]:
    return (RewardFunction("slow", 1.0, lambda _: time.sleep(0.1) or 1.0),)

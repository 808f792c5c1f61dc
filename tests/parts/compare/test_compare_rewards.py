"""The rewards of a final validation, from the pool's processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from appliance.compare.child import rewards
from appliance.errors import TrainingError
from appliance.tasks.task import Response, RewardFunction
from appliance.trainer.rewards import RewardPool


def numbers() -> tuple[RewardFunction, ...]:
    return (RewardFunction("it", 1.0, lambda response: float(response.text)),)


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    made = RewardPool(load=numbers, workers=1)
    yield made
    made.close()


@pytest.mark.parametrize(("said", "wanted"), [("1 x 3.5", [1.0, 0.0, 3.5]), ("2 x -1.5", [2.0, -1.5, -1.5])])
def test_one_that_failed_has_nothing_or_the_least(pool: RewardPool, said: str, wanted: list[float]) -> None:
    assert rewards([Response(each, "") for each in said.split()], pool=pool, most_failures=0.5) == wanted


def test_too_many_that_fail_are_an_error(pool: RewardPool) -> None:
    with pytest.raises(TrainingError) as caught:
        rewards([Response(each, "") for each in ("1", "x", "y")], pool=pool, most_failures=0.1)
    assert caught.value.message == "2 of 3 rewards of the final validation failed, more than 10%"
    why = "ValueError: could not convert string to float: 'y'"
    assert caught.value.hint == f"the last one: {why}; guard.reward_failures says how many may fail"

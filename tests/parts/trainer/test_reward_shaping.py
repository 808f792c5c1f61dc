"""Our rewards against verl's own DAPO reward manager, run on real batches."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from appliance.tasks.grading import Shaping
from appliance.tasks.tiny_model import byte_tokenizer

MAX_TOKENS, BUFFER, PENALTY = 20, 8, 0.75


def verls_reward(num_tokens: int, *, score: float) -> float:
    tokenizer = byte_tokenizer(max_positions=64)
    config = OmegaConf.create(
        {
            "reward": {
                "reward_kwargs": {
                    "max_resp_len": MAX_TOKENS,
                    "overlong_buffer_cfg": {"enable": True, "len": BUFFER, "penalty_factor": PENALTY, "log": True},
                }
            }
        }
    )
    by_verl = DAPORewardManager(config, tokenizer, lambda **_: {"score": score, "acc": score > 0})
    responses = torch.full((1, MAX_TOKENS), 65)
    mask = (torch.arange(4 + MAX_TOKENS) < 4 + num_tokens).long()[None]
    batch = DataProto.from_dict(
        tensors={"prompts": torch.full((1, 4), 65), "responses": responses, "attention_mask": mask},
        non_tensors={"data_source": ["math_dapo"], "reward_model": [{"ground_truth": "1"}]},
    )

    async def run() -> dict:
        by_verl.loop = asyncio.get_running_loop()
        return await by_verl.run_single(batch)

    return float(asyncio.run(run())["reward_score"])


@pytest.mark.parametrize("right", [True, False])
def test_rewards_are_verls_at_every_length(right: bool) -> None:
    """float32 there, float64 here: equal to 1e-6 of rewards up to 2."""
    shaping = Shaping(wrong=-1.0, max_tokens=MAX_TOKENS, buffer_tokens=BUFFER, penalty=PENALTY)
    ours = [shaping.reward(float(right), num_tokens=length) for length in range(1, MAX_TOKENS + 1)]
    theirs = [verls_reward(length, score=1.0 if right else -1.0) for length in range(1, MAX_TOKENS + 1)]
    assert ours == pytest.approx(theirs, abs=1e-6)
    assert min(ours) == pytest.approx((1.0 if right else -1.0) - PENALTY)


@pytest.mark.parametrize("value", [-3.2, 0.0, 0.1, 1.0, 7.25])
def test_rewards_of_an_own_task_are_verls_at_every_length(value: float) -> None:
    """Any number less the penalty: a wrong answer is not turned into -1. To 22 bits, see `exact_in_sums`."""
    shaping = Shaping(max_tokens=MAX_TOKENS, buffer_tokens=BUFFER, penalty=PENALTY, samples=4)
    ours = [shaping.reward(value, num_tokens=length) for length in range(1, MAX_TOKENS + 1)]
    theirs = [verls_reward(length, score=value) for length in range(1, MAX_TOKENS + 1)]
    assert ours == pytest.approx(theirs, rel=2.0**-21, abs=1e-6)
    assert ours[MAX_TOKENS - BUFFER - 1] == shaping.comparable(value) and min(ours) == ours[-1]


@pytest.mark.parametrize("samples", [2, 3, 6, 7, 8, 12, 16, 64])
@pytest.mark.parametrize("accuracy", [0.1, 0.3, 1.2, 50.3, 100.3, -7e-9, 9e14])
def test_equal_rewards_of_an_own_task_teach_nothing_and_are_filtered(accuracy: float, samples: int) -> None:
    """By verl's advantages in float32, and by its filter, which asks whether np.std is 0."""
    shaping = Shaping(max_tokens=MAX_TOKENS, buffer_tokens=BUFFER, penalty=PENALTY, samples=samples)
    for num_tokens in (1, MAX_TOKENS - 3, MAX_TOKENS):
        reward = shaping.reward(shaping.comparable(accuracy), num_tokens=num_tokens)
        rewards = torch.zeros(samples, 4).index_fill_(1, torch.tensor([3]), reward)
        advantages, _ = compute_grpo_outcome_advantage(rewards, torch.ones(samples, 4), np.array(["uid"] * samples))
        assert not advantages.any()
    assert np.std([shaping.comparable(accuracy)] * samples) == 0.0
    assert shaping.comparable(accuracy) == pytest.approx(accuracy, rel=2 * samples * 2.0**-24)


def test_rewards_of_built_in_tasks_are_left_as_they_are() -> None:
    assert Shaping().reward(0.1, num_tokens=1) == Shaping().comparable(0.1) == 0.1

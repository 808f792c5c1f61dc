"""The count of DAPO's dynamic sampling, and the end that verl no longer has."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from appliance.errors import TrainingError
from appliance.trainer.dynamic_sampling import DynamicSampling


@dataclass
class Counted:
    """What a step reads of the rollouts."""

    generated_prompts: int = 0
    generated_tokens: int = 0


def test_a_step_that_needs_too_many_prompts_ends_the_run() -> None:
    asked: list[int] = []
    sampling = DynamicSampling(at_first=32, max_prompts=64)
    refill = sampling.watched(asked.append)
    refill(20)
    refill(12)
    with pytest.raises(TrainingError) as caught:
        refill(1)
    assert asked == [20, 12]
    assert caught.value.message == (
        "a step asked for 65 prompts, and the limit is 64: nearly all of them have samples that are all right or all "
        "wrong"
    )
    assert caught.value.hint == (
        "the task is too easy or too hard for the model; or raise algorithm.max_generation_batches"
    )


def test_each_step_counts_anew() -> None:
    rollouts = Counted()
    sampling = DynamicSampling(at_first=32, max_prompts=64)
    refill = sampling.watched(lambda num_prompts: None)
    refill(32)
    rollouts.generated_prompts, rollouts.generated_tokens = 64, 6400
    verl = {"training/filter_groups/evicted_samples": 30, "training/filter_groups/discarded_surplus_samples": 2}
    assert sampling.end_step(verl, rollouts=rollouts, rollout_s=10.0) == {
        "generated_prompts": 64,
        "filtered_prompts": 30,
        "discarded_prompts": 2,
        "rollout_tokens_per_s": 640.0,
    }
    refill(32)
    rollouts.generated_prompts, rollouts.generated_tokens = 96, 8400
    assert sampling.end_step({}, rollouts=rollouts, rollout_s=10.0) == {
        "generated_prompts": 32,
        "filtered_prompts": 0,
        "discarded_prompts": 0,
        "rollout_tokens_per_s": 200.0,
    }


def test_no_limit_no_end() -> None:
    refill = DynamicSampling(at_first=32, max_prompts=0).watched(lambda num_prompts: num_prompts)
    assert [refill(10**6) for _ in range(3)] == [10**6] * 3


def test_verl_still_has_what_is_counted() -> None:
    """The names of its metrics, and that it ignores its own limit."""
    import inspect

    from verl.trainer.ppo.v1 import replay_buffer, trainer_base

    source = inspect.getsource(replay_buffer)
    assert 'f"{prefix}/filter_groups/evicted_samples"' in source
    assert 'f"{self._metrics_prefix(partition_id)}/filter_groups/discarded_surplus_samples"' in source
    assert "self.refill_fn(dispatch_count)" in source
    assert "max_num_gen_batches=%s is ignored" in inspect.getsource(trainer_base)

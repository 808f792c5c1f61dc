"""verl's own replay buffer, with its queue's listing in place of the queue: which prompts make a batch, when, and the
end that its dynamic sampling no longer has."""

from __future__ import annotations

import inspect
from collections import defaultdict
from types import SimpleNamespace

import pytest
from verl.trainer.ppo.v1 import replay_buffer, trainer_base
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from appliance.errors import TrainingError
from appliance.trainer.grade_book import GradeBook
from appliance.trainer.replay_buffer import DynamicSampling, choose_in_order, wait_for_rollouts
from appliance.trainer.rollouts import LOOK_AGAIN_S
from appliance.trainer.stopping import StopAsked


@pytest.fixture
def buffer() -> ReplayBuffer:
    made = ReplayBuffer("sync", {}, max_off_policy_threshold=None, max_off_policy_strategy="drop", sampler_kwargs={})
    made.prompt_global_steps = defaultdict(dict)
    return made


def test_prompts_are_picked_in_the_order_in_which_they_were_put(buffer: ReplayBuffer) -> None:
    names = [f"{number * 7919 % 1000}" for number in range(200)]
    buffer.prompt_global_steps["train"] = dict.fromkeys(names, 3)
    choose_in_order(buffer, is_busy=lambda: False, looks_early=True)
    wanted = [name for name in names if int(name) % 2]
    picked, _, steps = buffer._select_prompt_uids("train", set(wanted), 50)
    assert picked == wanted[:50] and steps == dict.fromkeys(names, 3)


def test_older_steps_come_first(buffer: ReplayBuffer) -> None:
    buffer.prompt_global_steps["train"] = {"a": 4, "b": 3, "c": 4}
    choose_in_order(buffer, is_busy=lambda: False, looks_early=True)
    assert buffer._select_prompt_uids("train", {"a", "b", "c"}, 2)[0] == ["b", "a"]


def test_samples_stand_in_the_order_of_their_prompts_whichever_came_first(
    buffer: ReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What verl makes of the choice: the batch's keys, from a table in the order of arrival."""
    monkeypatch.setattr(replay_buffer.tq, "kv_clear", lambda **_: None)
    buffer.prompt_global_steps["train"] = dict.fromkeys(("z", "y", "x", "w"), 1)
    arrived = ["w_0_0", "x_10_0", "x_2_0", "y_0_1", "y_0_0", "z_1_0", "z_0_0", "gone_0_0"]
    buffer.partitions["train"] = {key: {"tag": key} for key in arrived}
    choose_in_order(buffer, is_busy=lambda: False, looks_early=True)
    picked, samples, _ = buffer._select_prompt_uids("train", {"z", "y", "x", "w"}, 3)
    batch = buffer._materialize_batch("train", picked, samples)
    assert batch.keys == ["z_0_0", "z_1_0", "y_0_0", "y_0_1", "x_2_0", "x_10_0"]
    assert [tag["tag"] for tag in batch.tags] == batch.keys


@pytest.mark.parametrize(("looks_early", "waits"), [(True, 0), (False, 3)])
def test_it_looks_when_nothing_is_under_way(
    buffer: ReplayBuffer, monkeypatch: pytest.MonkeyPatch, looks_early: bool, waits: int
) -> None:
    waited, looked = [], []
    monkeypatch.setattr(replay_buffer.tq, "kv_list", lambda: looked.append(len(waited)))
    choose_in_order(buffer, is_busy=lambda: len(waited) < 3, looks_early=looks_early)
    buffer._wait_for_next_poll = lambda *arguments: waited.append(arguments)
    buffer._sync_metadata_from_transfer_queue()
    assert looked == [waits]


def test_it_waits_for_rollouts_by_their_signal_and_leaves_when_asked_to(buffer: ReplayBuffer) -> None:
    waited: list[float] = []
    stops: list[StopAsked] = []

    def check_stop() -> None:
        if stops:
            raise stops[0]

    wait_for_rollouts(buffer, rollouts=SimpleNamespace(wait=waited.append), check_stop=check_stop)
    assert buffer._wait_for_next_poll("train", 7.0) == 7.0
    stops.append(StopAsked())
    with pytest.raises(StopAsked):
        buffer._wait_for_next_poll("train", 7.0)
    assert waited == [LOOK_AGAIN_S]


def test_a_step_that_needs_too_many_prompts_ends_the_run() -> None:
    requests: list[int] = []
    sampling = DynamicSampling(at_first=32, max_prompts=64)
    refill = sampling.limited(requests.append)
    refill(20)
    refill(12)
    with pytest.raises(TrainingError) as caught:
        refill(1)
    assert requests == [20, 12]
    assert caught.value.message == (
        "a step asked for 65 prompts, and the limit is 64: nearly all of them have samples that are all right or all "
        "wrong"
    )
    assert caught.value.hint == (
        "the task is too easy or too hard for the model; or raise algorithm.max_generation_batches"
    )


def test_each_step_counts_anew() -> None:
    rollouts = SimpleNamespace(grades=GradeBook())
    sampling = DynamicSampling(at_first=32, max_prompts=64)
    refill = sampling.limited(lambda num_prompts: None)
    refill(32)
    rollouts.generated_prompts, rollouts.generated_tokens = 64, 6400
    for reward in (1.0, -1.0, 1.0, 1.0):
        rollouts.grades.add_prompt_reward(reward)
    verl = {"training/filter_groups/evicted_samples": 30, "training/filter_groups/discarded_surplus_samples": 2}
    assert sampling.end_step(verl, rollouts=rollouts, rollout_s=10.0) == {
        "generated_prompts": 64,
        "filtered_prompts": 30,
        "discarded_prompts": 2,
        "rollout_tokens_per_s": 640.0,
        "generated_reward_mean": 0.5,
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
    refill = DynamicSampling(at_first=32, max_prompts=0).limited(lambda num_prompts: num_prompts)
    assert [refill(10**6) for _ in range(3)] == [10**6] * 3


def test_verl_still_has_what_is_counted() -> None:
    """The names of its metrics, and that it ignores its own limit."""
    source = inspect.getsource(replay_buffer)
    assert 'f"{prefix}/filter_groups/evicted_samples"' in source
    assert 'f"{self._metrics_prefix(partition_id)}/filter_groups/discarded_surplus_samples"' in source
    assert "self.refill_fn(dispatch_count)" in source
    assert "max_num_gen_batches=%s is ignored" in inspect.getsource(trainer_base)

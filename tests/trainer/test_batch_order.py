"""verl's own replay buffer, with its queue's listing in place of the queue: which prompts make a batch, and when."""

from __future__ import annotations

from collections import defaultdict

import pytest
from verl.trainer.ppo.v1 import replay_buffer
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from appliance.trainer.batch_order import choose_in_order


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

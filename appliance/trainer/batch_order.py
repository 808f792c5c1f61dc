"""verl's replay buffer, made to choose the same batch again: by the order of the prompts, not by a clock or a hash.

verl looks into the buffer whenever something came, and picks from a set. For a plain batch that makes no difference,
all prompts are taken. With dynamic sampling (DAPO) it does: how many prompts are drawn again depends on when it looked,
and which surplus ones are dropped on the hash of a random name. So it looks when nothing is under way, and picks in
order. On a GPU, where the last bits are not promised, it looks early, and new prompts are fetched meanwhile.

The samples of what it picks stand in the batch as they came. Sums over them would differ in their last bits, and then
the weights: they are put into the order of their prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


def choose_in_order(buffer: ReplayBuffer, *, is_busy: Callable[[], bool], looks_early: bool) -> None:
    """is_busy: whether prompts are being generated.  looks_early: see above."""
    look = buffer._sync_metadata_from_transfer_queue

    def look_when_all_came() -> None:
        while is_busy():
            buffer._wait_for_next_poll("", 0.0)
        look()

    def pick(
        partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> tuple[list[str], dict[str, Any], dict[str, int]]:
        steps = dict(buffer.prompt_global_steps[partition_id])  # in the order in which the prompts were put
        in_order = sorted((key for key in steps if key in sampleable_keys), key=steps.__getitem__)
        return in_order[:batch_size], _sorted(buffer.partitions[partition_id], prompts=in_order), steps

    buffer._select_prompt_uids = pick
    if not looks_early:
        buffer._sync_metadata_from_transfer_queue = look_when_all_came


def _sorted(samples: dict[str, Any], *, prompts: list[str]) -> dict[str, Any]:
    """Samples (`prompt_session_index`) in the order of their prompts, and of the sessions of each; others last."""
    places = {prompt: place for place, prompt in enumerate(prompts)}

    def place(key: str) -> tuple[int, int, int]:
        prompt, session, index = key.split("_")
        return places.get(prompt, len(places)), int(session), int(index)

    return {key: samples[key] for key in sorted(samples, key=place)}

"""verl's replay buffer: the same batch again in every attempt, and an end to dynamic sampling.

verl looks into the buffer whenever something came, and picks from a set. For a plain batch that makes no difference,
all prompts are taken. With dynamic sampling (DAPO) it does: how many prompts are drawn again depends on when it looked,
and which surplus ones are dropped on the hash of a random name. So it looks when nothing is under way, and picks in the
order of the prompts. On a GPU, where the last bits are not promised, it looks early, and new prompts are fetched
meanwhile. The samples of what it picks stand in the batch as they came. Sums over them would differ in their last bits,
and then the weights: they are put into the order of their prompts.

DAPO's filter is verl's own: a prompt whose samples are all right or all wrong teaches nothing and becomes two new ones,
until a step has enough. Its end is ours: verl ignores `max_num_gen_batches`, and a model that solves all or nothing
would generate for ever.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from appliance.errors import TrainingError
from appliance.trainer.rollouts import LOOK_AGAIN_S, Rollouts

Refill = Callable[[int], Any]


def wait_for_rollouts(buffer: ReplayBuffer, *, rollouts: Rollouts, check_stop: Callable[[], None]) -> None:
    """Wait for rollouts by their signal and fail when they fail. verl's buffer sleeps 2 s between two looks, which is
    longer than a step of a small model, and for ever when generating failed; it offers no hook for either.

    check_stop: raises when nothing more is to be waited for.
    """

    def wait(partition_id: str, last_debug_time: float) -> float:
        check_stop()
        rollouts.wait(LOOK_AGAIN_S)
        return last_debug_time

    buffer._wait_for_next_poll = wait


def choose_in_order(buffer: ReplayBuffer, *, is_busy: Callable[[], bool], looks_early: bool) -> None:
    """Have the buffer pick in the order of the prompts. is_busy: whether prompts are being generated.  looks_early:
    see above."""
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
    """Sort samples (`prompt_session_index`) in the order of their prompts, and of the sessions of each; others last."""
    places = {prompt: place for place, prompt in enumerate(prompts)}

    def place(key: str) -> tuple[int, int, int]:
        prompt, session, index = key.split("_")
        return places.get(prompt, len(places)), int(session), int(index)

    return {key: samples[key] for key in sorted(samples, key=place)}


class DynamicSampling:
    """Counter of the prompts that were requested, one step at a time."""

    def __init__(self, *, at_first: int, max_prompts: int) -> None:
        """at_first: number of prompts that verl asks for at the start of a step.  max_prompts: number of prompts above
        which a step ends the run; 0: any number."""
        self._at_first = at_first
        self._max_prompts = max_prompts
        self._num_requested = at_first
        self._prompts_before = self._tokens_before = 0

    def limited(self, refill: Refill) -> Refill:
        """Count what verl asks for with `refill`. What is returned raises TrainingError above the limit."""

        def ask(num_prompts: int) -> Any:
            self._num_requested += num_prompts
            if self._max_prompts and self._num_requested > self._max_prompts:
                raise TrainingError(
                    f"a step asked for {self._num_requested} prompts, and the limit is {self._max_prompts}: nearly all "
                    "of them have samples that are all right or all wrong",
                    hint="the task is too easy or too hard for the model; or raise algorithm.max_generation_batches",
                )
            return refill(num_prompts)

        return ask

    def end_step(self, verl: dict[str, Any], *, rollouts: Rollouts, rollout_s: float) -> dict[str, float]:
        """Return the step's keys of the line of metrics, and count from 0 again. verl: the step's metrics.
        filtered_prompts: all samples equally right.  discarded_prompts: good, but the step was full.
        generated_reward_mean: of all that was generated, which is what the guards judge: what a filter leaves is
        never all right."""
        prompts = rollouts.generated_prompts - self._prompts_before
        tokens = rollouts.generated_tokens - self._tokens_before
        self._prompts_before, self._tokens_before = rollouts.generated_prompts, rollouts.generated_tokens
        self._num_requested = self._at_first
        rewards = rollouts.grades.take_prompt_rewards()
        means = {"generated_reward_mean": statistics.fmean(rewards)} if rewards else {}
        return means | {
            "generated_prompts": prompts,
            "filtered_prompts": int(verl.get("training/filter_groups/evicted_samples", 0)),
            "discarded_prompts": int(verl.get("training/filter_groups/discarded_surplus_samples", 0)),
            "rollout_tokens_per_s": tokens / rollout_s,
        }

"""DAPO's dynamic sampling, counted: prompts whose samples are all right or all wrong teach nothing, verl replaces them.

verl does the filtering (verl/trainer/ppo/v1/replay_buffer.py): every replaced prompt becomes two new ones, until a step
has enough. What it no longer has is an end: `max_num_gen_batches` is ignored, and a model that solves all or nothing
would generate for ever. The limit is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from appliance.errors import TrainingError
from appliance.trainer.rollouts import Rollouts

_FILTERED = "training/filter_groups/evicted_samples"
_DISCARDED = "training/filter_groups/discarded_surplus_samples"

Refill = Callable[[int], Any]


class DynamicSampling:
    """Of one step at a time. at_first: prompts that verl asks for at the start of a step.

    max_prompts: a step that asks for more ends the run; 0: any number.
    """

    def __init__(self, *, at_first: int, max_prompts: int) -> None:
        self._at_first = at_first
        self._max_prompts = max_prompts
        self._asked = at_first
        self._prompts_before = self._tokens_before = 0

    def watched(self, refill: Refill) -> Refill:
        """verl's way to ask for more prompts, counted. It raises TrainingError above the limit."""

        def ask(num_prompts: int) -> Any:
            self._asked += num_prompts
            if self._max_prompts and self._asked > self._max_prompts:
                raise TrainingError(
                    f"a step asked for {self._asked} prompts, and the limit is {self._max_prompts}: nearly all of "
                    "them have samples that are all right or all wrong",
                    hint="the task is too easy or too hard for the model; or raise algorithm.max_generation_batches",
                )
            return refill(num_prompts)

        return ask

    def end_step(self, verl: dict[str, Any], *, rollouts: Rollouts, rollout_s: float) -> dict[str, float]:
        """The step's line of metrics, and the count begins anew. verl: the step's metrics.

        filtered_prompts: all samples equally right.  discarded_prompts: good, but the step was full.
        """
        prompts = rollouts.generated_prompts - self._prompts_before
        tokens = rollouts.generated_tokens - self._tokens_before
        self._prompts_before, self._tokens_before = rollouts.generated_prompts, rollouts.generated_tokens
        self._asked = self._at_first
        return {
            "generated_prompts": prompts,
            "filtered_prompts": int(verl.get(_FILTERED, 0)),
            "discarded_prompts": int(verl.get(_DISCARDED, 0)),
            "rollout_tokens_per_s": tokens / rollout_s,
        }

"""The trainer that can be asked to save and stop in any phase. What it saves is the state after the last finished step.

Between two steps that state is what the workers hold: a step that has begun has changed nothing but the position in the
data until its update. So a save needs no end of the step, only the position of before it (trainer/checkpoints.py).
"""

from __future__ import annotations

from typing import Any

from transfer_queue import KVBatchMeta

from appliance.errors import ApplianceError
from appliance.trainer.rewarded import RewardedTrainer
from appliance.trainer.rollouts import Rollouts
from appliance.trainer.stopping import StopAsked, Stopping


class StoppableTrainer(RewardedTrainer):
    """Adds the places where a step may be left, and `save_and_stop`."""

    def __init__(self, *, stopping: Stopping, **others: Any) -> None:
        super().__init__(**others)
        self._stopping = stopping

    @property
    def _is_leaving(self) -> bool:
        return self._stopping.asked

    def watch_rollouts(self, rollouts: Rollouts) -> None:
        super().watch_rollouts(rollouts)
        wait = self.replay_buffer._wait_for_next_poll

        def wait_or_leave(*args: Any) -> float:
            self._stopping.check()
            return wait(*args)

        self.replay_buffer._wait_for_next_poll = wait_or_leave

    def on_step_begin(self) -> None:
        self._stopping.check()
        super().on_step_begin()

    def on_sample_end(self) -> None:
        super().on_sample_end()
        self._stopping.check()

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._compute_old_log_prob(batch, metrics=metrics)
        self._stopping.check()
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._stopping.check()
        self._stopping.begin_change()
        return super()._update_actor(batch, metrics=metrics)

    def _validate(self) -> dict[str, float]:
        """A validation that is cut is left out of its step's line: the step itself is finished and kept."""
        try:
            self._stopping.check()
            return super()._validate()
        except StopAsked:
            if self.global_steps == self._stopping.finished:  # no step waits for its line
                raise
            return {}

    def _validate_bf16(self, values: dict[str, float]) -> float | None:
        """Not begun any more: it may take new engines, twice."""
        self._stopping.check()
        return super()._validate_bf16(values)

    def _compute_metrics(self, *args: Any, **kwargs: Any) -> None:
        super()._compute_metrics(*args, **kwargs)
        self._note_saved()
        self._stopping.note_finished(self.global_steps)
        self._stopping.check()

    def save_and_stop(self) -> ApplianceError:
        """Save what is not saved yet. Returns the error that ends this process: SavedAndStopped or Interrupted."""
        if self._stopping.finished != self._stopping.saved:
            if self._rollouts is not None:
                self._rollouts.abandon()
            self.checkpoints.save_now(f"stopped by {self._stopping.why}")
            self._note_saved()
        return self._stopping.leave()

    def _note_saved(self) -> None:
        self._stopping.note_saved(self.checkpoints.saved_step)

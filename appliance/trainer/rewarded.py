"""The trainer that looks after its rewards: counts those that failed, and stops when they say too little."""

from __future__ import annotations

from typing import Any

from appliance.errors import GuardStop
from appliance.trainer.reward_faults import RewardFaults
from appliance.trainer.watched import WatchedTrainer


class RewardedTrainer(WatchedTrainer):
    """Adds `reward_failures` to the line of a step."""

    def __init__(self, **others: Any) -> None:
        super().__init__(**others)
        self._reward_faults = RewardFaults(self.run_dir, most=self.plan.guard.reward_failures)
        self._reward_failures = 0
        self._stop_after_step: GuardStop | None = None

    def on_sample_end(self) -> None:
        super().on_sample_end()
        self._reward_failures = self._end_rewards(f"step {self.global_steps}")

    def _validate(self) -> dict[str, float]:
        values = super()._validate()
        try:
            self._end_rewards(f"the validation of step {self.global_steps}")
        except GuardStop as error:
            if self.global_steps == 0:
                raise
            self._stop_after_step = error  # the step's weights have moved: it is written down first, and saved
        return values

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._stop_after_step is not None:
            raise self._stop_after_step

    def _end_step(self, line: dict[str, Any], **how: Any) -> None:
        super()._end_step(line, **how)
        if self._stop_after_step is not None:
            self.checkpoints.save_now("stopped by the guard")
            raise self._stop_after_step

    def _end_rewards(self, what: str) -> int:
        """Raises GuardStop, after the last finished step is saved: none is learnt from rewards that failed."""
        pool = self._rollouts.pool
        try:
            return self._reward_faults.end(what, graded=pool.graded, faults=pool.faults, last=pool.last_fault)
        except GuardStop:
            self.checkpoints.save_now("stopped by the guard")
            raise

    def _write(self, line: dict[str, Any]) -> dict[str, Any]:
        return super()._write({**line, "reward_failures": self._reward_failures} if line["step"] else line)

"""Validation in what the engines run and, when it is due, the same one with every layer in BF16."""

from __future__ import annotations

from collections.abc import Callable

from appliance.errors import TrainingError
from appliance.record.plan import RunPlan, Switching
from appliance.terms.schemes import Scheme
from appliance.trainer.precision import BF16, RolloutPrecision

Metrics = dict[str, float]
Validate = Callable[[], Metrics]


class Validation:
    """scheme: what the newest validation was made in."""

    def __init__(self, plan: RunPlan, *, precision: RolloutPrecision, check_stop: Callable[[], None]) -> None:
        """check_stop: raises StopAsked when no new validation is to begin."""
        self.scheme = precision.live.label
        self._plan = plan
        self._precision = precision
        self._check_stop = check_stop
        self._line: dict[str, float | None] = {}

    def make(
        self, validate: Validate, *, step: int, problems: Callable[[], int], update: Callable[[], None]
    ) -> Metrics:
        """verl's metrics of the validation after a step.

        validate: verl's own.  problems: how many were scored so far.  update: sends the weights as they are once more.
        Raises StopAsked, and TrainingError when verl reports no mean.
        """
        before = problems()
        values = validate()
        scored, self.scheme = problems() - before, self._precision.live.label
        bf16 = self._mean_in_bf16(values, validate=validate, step=step, update=update)
        self._line = {"val_reward_mean": mean_of(values), "val_reward_bf16_mean": bf16, "val_samples": scored}
        return values

    def take(self) -> dict[str, float | None]:
        """The contract's keys of a validation that is in no line of metrics yet."""
        line, self._line = self._line, {}
        return line

    def _mean_in_bf16(
        self, values: Metrics, *, validate: Validate, step: int, update: Callable[[], None]
    ) -> float | None:
        """By two more updates of the same weights. None: not due."""
        self._check_stop()  # it may take new engines, twice
        if self._precision.live.label == str(Scheme.BF16):
            return mean_of(values)
        if not self._precision.validates_bf16(step):
            return None
        with self._precision.meanwhile(BF16):
            update()
            if self._precision.live.label != str(Scheme.BF16):  # asked to stop a moment ago
                return None
            values = validate()
        is_last = step >= self._plan.steps
        if not (is_last and self._plan.guard.switching is Switching.RESTART):  # engines to end with: not worth a start
            update()
        return mean_of(values)


def mean_of(verl: Metrics) -> float:
    """The one mean of verl's validation metrics. Raises TrainingError when there is none."""
    means = [value for name, value in verl.items() if name.startswith("val-core/") and "/mean@" in name]
    if len(means) != 1:
        raise TrainingError(f"expected one validation mean from verl, got {len(means)} in {sorted(verl)}")
    return float(means[0])

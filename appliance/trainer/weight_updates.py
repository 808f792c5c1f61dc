"""The weight updates of an attempt: new engines before one that takes them, and every rank's proof after each.

No rollout before each rank has proven the very update that was sent. verl updates at the start, after each step and,
with a colocated reward model, during validation: all by one call.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from appliance.record.plan import RunPlan
from appliance.sync.records import SyncRecord, check_sync
from appliance.trainer.engines import RolloutEngines
from appliance.trainer.precision import RolloutPrecision


class WeightUpdates:
    """count: so far.  last: what the newest one brought, None before the first."""

    def __init__(
        self,
        plan: RunPlan,
        *,
        precision: RolloutPrecision,
        engines: RolloutEngines,
        restart: Callable[[str], None],
        is_leaving: Callable[[], bool],
    ) -> None:
        """restart: has engines started in `precision.starts_in`; gets why.  is_leaving: whether the run was asked to
        stop: engines that start now would not be used."""
        self.count = 0
        self.last: SyncRecord | None = None
        self._plan = plan
        self._precision = precision
        self._engines = engines
        self._restart = restart
        self._is_leaving = is_leaving

    def proven(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """In place of verl's call. What it returns raises what `restart` raises, SyncError when a rank has not proven
        the update, and as RolloutPrecision.took."""

        def update_and_check(*args: Any, **kwargs: Any) -> Any:
            result = update(*args, **kwargs)
            self._check()
            return result

        def restart_and_update(*args: Any, **kwargs: Any) -> Any:
            present = self._engines.generation.precision
            if self._precision.starts_in == present:
                return update_and_check(*args, **kwargs)
            if self._is_leaving():  # the step ends with a proven update all the same
                with self._precision.meanwhile(present):
                    return update_and_check(*args, **kwargs)
            self._restart(f"rollouts are to be {self._precision.starts_in.text}")
            return update_and_check(*args, **kwargs)

        return restart_and_update

    def _check(self) -> None:
        self.count += 1
        self.last = check_sync(
            Path(self._plan.run_dir),
            sync=self.count,
            replicas=len(self._plan.rollout.replicas),
            ranks=self._plan.rollout.tensor_parallel,
            first=self._engines.generation.after_sync + 1,
        )
        self._precision.took(self.last)

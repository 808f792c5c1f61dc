"""verl's synchronous trainer with our eyes on it. Nothing of the algorithm is changed here."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.rollout.llm_server import LLMServerManager

from appliance.errors import ApplianceError, AttestationError, TrainingError
from appliance.guard.governor import Decision
from appliance.plan.model import RunPlan, Switching
from appliance.quant.device import CPU
from appliance.quant.scheme import Scheme
from appliance.run.acknowledge import SyncRecord, check_sync
from appliance.run.attest import check_attestations, fingerprint
from appliance.run.checkpoints import checkpoint_folder
from appliance.run.events import append_event, run_started
from appliance.run.generation import attestations_at
from appliance.run.last_line import owed_line
from appliance.trainer.attest import attest_driver, attest_trainers
from appliance.trainer.batch_order import choose_in_order
from appliance.trainer.checkpoints import Checkpoints, read_state
from appliance.trainer.correction import BatchCorrection
from appliance.trainer.dynamic_sampling import DynamicSampling
from appliance.trainer.engine_watch import EngineWatch
from appliance.trainer.engines import RolloutEngines
from appliance.trainer.export import export_checkpoint
from appliance.trainer.governed import Governed, signals_of, stop
from appliance.trainer.metrics import (
    append_metrics,
    left_out,
    step_metrics,
    tracked,
    validation_mean,
    validation_metrics,
)
from appliance.trainer.precision import BF16, Live, RolloutPrecision, validates_bf16
from appliance.trainer.rollouts import Rollouts
from appliance.trainer.step_telemetry import keeping_fetched, measure_step
from appliance.trainer.telemetry import StepTelemetry
from appliance.trainer.tracking_end import finish_tracking

LOOK_AGAIN_S = 1.0  # how long a wait for rollouts lasts at most before the buffer is looked at again


class WatchedTrainer(PPOTrainerSync):
    """Adds: phases as events, attestations before the first step, the proof of each sync before any rollout, one
    metrics line per step, the final `model/`."""

    def __init__(self, *, config: DictConfig, plan: RunPlan, on_engine_death: Callable[[ApplianceError], None]) -> None:
        """on_engine_death: called on another thread, with what happened; see EngineWatch."""
        super().__init__(config)
        self._on_engine_death = on_engine_death
        self._engine_watch: EngineWatch | None = None
        self._rollouts: Rollouts | None = None
        self.plan = plan
        self.run_dir = Path(plan.run_dir)
        self._started = run_started(self.run_dir)
        self._phase_now = "start"
        self._telemetry: StepTelemetry | None = None
        self._governed = Governed(plan)
        self._correction = BatchCorrection(plan)
        self.checkpoints: Checkpoints | None = None
        self._precision = RolloutPrecision(plan)
        as_saved = plan.resume_from and not self._governed.had_stopped
        kept = read_state(Path(plan.resume_from)).precision if as_saved else None
        self._precision.begin(self._governed.measures, kept=kept)
        self._engines = RolloutEngines(self.run_dir, precision=self._precision.starts_in)
        self._engine_restart_s = 0.0
        self._rolled: Live = self._precision.live
        self._sampling = DynamicSampling(
            at_first=plan.prompts_per_step, max_prompts=plan.algorithm.max_generated_prompts
        )
        self.replay_buffer.refill_fn = self._sampling.watched(self.replay_buffer.refill_fn)
        self._validation: dict[str, float] = {}
        self._syncs = 0
        self._last_sync: SyncRecord | None = None
        self._step_sync: SyncRecord | None = None

    @property
    def _restarts(self) -> bool:
        """Whether a change of scheme takes new engines."""
        return self.plan.guard.switching is Switching.RESTART

    @property
    def _restarts_next(self) -> bool:
        """Whether the step after this one has engines started."""
        if not self._restarts:
            return False
        validates = validates_bf16(self.plan, step=self.global_steps + 1) and self._precision.starts_in != BF16
        return validates or self._precision.starts_in != self._engines.generation.precision

    @property
    def _is_last(self) -> bool:
        return self.global_steps >= self.total_training_steps

    @property
    def _is_leaving(self) -> bool:
        """Whether it was asked to stop: engines that start now would not be used."""
        return False

    def _phase(self, what: str) -> None:
        self._phase_now = what
        append_event(self.run_dir, kind="phase", what=what)

    def watch_rollouts(self, rollouts: Rollouts) -> None:
        """Wait for rollouts by their signal and fail when they fail. verl's buffer sleeps 2 s between two looks, which
        is longer than a step of a small model, and for ever when generating failed; it offers no hook for either."""

        def wait(partition_id: str, last_debug_time: float) -> float:
            rollouts.wait(LOOK_AGAIN_S)
            return last_debug_time

        self.replay_buffer._wait_for_next_poll = wait
        choose_in_order(self.replay_buffer, is_busy=lambda: rollouts.is_busy, looks_early=self.plan.device != CPU)
        self._rollouts = rollouts

    # start-up

    def _setup(self) -> None:
        self._phase("load-model")
        super()._setup()

    def on_init_end(self) -> None:
        self.checkpoints = self._open_checkpoints()
        self._watch_engines()
        self._phase("attest")
        self._correction.install(self.actor_rollout_wg, actor=self.config.actor_rollout_ref.actor)
        attest_driver(self.plan)
        attest_trainers(self.plan, workers=self.actor_rollout_wg.workers)
        self._check_attestations()
        self._phase("sync")
        self._check_every_sync()
        super().on_init_end()

    def on_train_begin(self) -> None:
        """The engines are as at the end of the last step; what the guard said after it comes with the next update."""
        super().on_train_begin()
        self._precision.want(self._governed.measures)

    def _watch_engines(self) -> None:
        self._engine_watch = EngineWatch(self.llm_server_manager.server_handles, on_death=self._on_engine_death)

    def stop_watching(self) -> None:
        """Before the engines are ended on purpose."""
        if self._engine_watch is not None:
            self._engine_watch.stop()

    def end_tracking(self) -> None:
        """Have the backends of `logging.backends` write what they hold: verl leaves that to its destructor. Never
        raises."""
        tracking = getattr(self, "logger", None)  # there since the training began
        if tracking is not None:
            finish_tracking(tracking.finish, run_dir=self.run_dir)

    def _open_checkpoints(self) -> Checkpoints:
        """With the driver's part of the checkpoint put back, when the weights were loaded from one."""
        opened = Checkpoints(
            self.plan,
            save_workers=self._save_workers,
            data_state=self.train_dataloader.state_dict,
        )
        if self.plan.resume_from:
            self.train_dataloader_it = iter(self.train_dataloader)  # draws from the random state that is put back next
            opened.restore(Path(self.plan.resume_from))
        return opened

    def _save_workers(self, folder: Path, step: int) -> None:
        self.actor_rollout_wg.save_checkpoint(str(folder / "actor"), None, step, max_ckpt_to_keep=None)
        if self.use_critic:
            self.critic_wg.save_checkpoint(str(folder / str(Role.Critic)), None, step, max_ckpt_to_keep=None)

    def _check_attestations(self) -> None:
        expected = attestations_at(self.plan, self._engines.generation.precision)
        problems = check_attestations(self.run_dir, expected, pins=self.plan.pins, fingerprint=fingerprint())
        if problems:
            raise AttestationError("; ".join(problems), hint="see attest/ in the run folder")

    def _check_every_sync(self) -> None:
        """No rollout before each rank has proven the very update that was sent. verl syncs at the start, after each
        step and, with a colocated reward model, during validation: all by this one call."""
        update_weights = self.checkpoint_manager.update_weights

        def update_and_check(*args: Any, **kwargs: Any) -> Any:
            result = update_weights(*args, **kwargs)
            self._check_sync()
            return result

        def restart_and_update(*args: Any, **kwargs: Any) -> Any:
            present = self._engines.generation.precision
            if self._precision.starts_in == present:
                return update_and_check(*args, **kwargs)
            if self._is_leaving:  # the step ends with a proven update all the same
                with self._precision.meanwhile(present):
                    return update_and_check(*args, **kwargs)
            self._restart_engines(why=f"rollouts are to be {self._precision.starts_in.text}")
            return update_and_check(*args, **kwargs)

        self.checkpoint_manager.update_weights = restart_and_update

    def _check_sync(self) -> None:
        """Raises SyncError, and as RolloutPrecision.took."""
        self._syncs += 1
        self._last_sync = check_sync(
            self.run_dir,
            sync=self._syncs,
            replicas=len(self.plan.rollout.replicas),
            ranks=self.plan.rollout.tensor_parallel,
            first=self._engines.generation.after_sync + 1,
        )
        self._precision.took(self._last_sync)

    def _restart_engines(self, *, why: str) -> None:
        """New rollout engines in place of the present ones, in the precision that is wanted, and what they say checked;
        a weight update must follow. Raises EngineError, AttestationError."""
        before = self._phase_now
        self._phase("restart-engines")
        while self._rollouts is not None and self._rollouts.is_busy:  # still watched: one that dies ends the wait
            self._rollouts.wait(LOOK_AGAIN_S)
        self.stop_watching()
        old = self.llm_server_manager
        new, restart = self._engines.restart(
            old,
            precision=self._precision.starts_in,
            after_sync=self._syncs,
            start=lambda: LLMServerManager.create(
                config=self.config,
                worker_group=self.actor_rollout_wg,
                rollout_resource_pool=old.rollout_resource_pool,
            ),
        )
        self.llm_server_manager = new
        self._watch_engines()
        self.checkpoint_manager.remove_replicas(old.get_replicas())
        self.checkpoint_manager.add_replicas(new.get_replicas())
        self.checkpoint_manager.sleep_replicas()  # as verl does with the first ones: an update wakes them
        if self._rollouts is not None:
            self._rollouts.serve_by(new.server_handles)
        self._check_attestations()
        self._engine_restart_s += restart.seconds
        append_event(self.run_dir, kind="note", what=restart.text, why=why, **restart.numbers())
        self._phase(before)

    # a step

    def on_sample_begin(self) -> None:
        self._phase("rollout")
        self._rolled = self._precision.live
        super().on_sample_begin()

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._phase("log-probs")
        with keeping_fetched() as fetched:
            batch = super()._compute_old_log_prob(batch, metrics=metrics)
        batch, self._telemetry = measure_step(batch, cap=self._correction.token_cap, fetched=fetched.data)
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._compute_advantage(batch, metrics=metrics)
        return self._correction.prepare(batch, step=self.global_steps, correction=self._governed.correction)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if self._telemetry is not None and self._telemetry.nonfinite_fraction:
            metrics.update(left_out(self.run_dir, telemetry=self._telemetry, step=self.global_steps))
            return batch
        self._phase("update")
        self.checkpoints.begin_update()
        batch = super()._update_actor(batch, metrics=metrics)
        self._correction.after_update(
            batch, step=self.global_steps, reported=metrics, log_probs=self.actor_rollout_wg.compute_log_prob
        )
        return batch

    def on_step_end(self) -> None:
        self._phase("sync")
        before = self._engine_restart_s
        super().on_step_end()
        self.timing_raw["update_weights"] -= self._engine_restart_s - before
        self._step_sync = self._last_sync

    def _validate(self) -> dict[str, float]:
        self._phase("validate")
        before = self._rollouts.validated
        values = super()._validate()
        scored, live = self._rollouts.validated - before, self._precision.live
        self._validation = validation_metrics(values, samples=scored, bf16=self._validate_bf16(values))
        if self.global_steps == 0:
            self._write({"step": 0, "scheme": live.label, **self._validation})
            self._validation = {}
        return values

    def _validate_bf16(self, values: dict[str, float]) -> float | None:
        """The same validation with every layer in BF16, by two more updates of the same weights. None: not due."""
        if self._precision.live.label == str(Scheme.BF16):
            return validation_mean(values)
        if not validates_bf16(self.plan, step=self.global_steps):
            return None
        with self._precision.meanwhile(BF16):
            self.checkpoint_manager.update_weights(self.global_steps)
            if self._precision.live.label != str(Scheme.BF16):  # asked to stop a moment ago
                return None
            values = super()._validate()
        if not (self._restarts and self._is_last):  # engines to end with are not worth a start
            self.checkpoint_manager.update_weights(self.global_steps)
        return validation_mean(values)

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        if self._telemetry is None:
            raise TrainingError(f"step {global_steps} ended without log-probabilities to compare")
        if self._step_sync is None:
            raise TrainingError(f"step {global_steps} ended without a weight update")
        line = step_metrics(
            metrics,
            timing_s=timing_raw,
            mismatch=self._telemetry.mismatch,
            correction=self._correction.metrics(),
            sync=self._step_sync,
            plan=self.plan,
            step=global_steps,
        )
        if self._engine_restart_s:
            line["engine_restart_s"], self._engine_restart_s = round(self._engine_restart_s, 4), 0.0
        line |= self._rolled.metrics() | self._governed.metrics()
        line["telemetry_s"] = round(line["telemetry_s"] + self._telemetry.seconds, 6)
        if self.plan.algorithm.filters and self._rollouts is not None:
            line |= self._sampling.end_step(metrics, rollouts=self._rollouts, rollout_s=timing_raw["gen"])
        written = self._write({**line, **self._telemetry.metrics(), **self._validation})
        metrics.update(tracked(written))  # verl sends `metrics` to the backends next
        decision = self._govern(line, telemetry=self._telemetry)
        self._end_step(written, stop_for=decision)
        self._validation = {}

    def _end_step(self, line: dict[str, Any], *, stop_for: Decision | None) -> None:
        """The step is written down and judged: save it when it is due. Raises GuardStop, after the step is saved."""
        self.checkpoints.end_step(line, precision=self._precision.state, is_last=self._is_last)
        if stop_for is not None:
            raise stop(stop_for, saved=self.checkpoints.save_now("stopped by the guard"))
        if self._restarts_next:  # new engines may fail to start: the run then goes on from here
            self.checkpoints.save_now("new rollout engines are next")

    def _govern(self, line: dict[str, Any], *, telemetry: StepTelemetry) -> Decision | None:
        decision = self._governed.after_step(signals_of(line, telemetry=telemetry, cap=self._correction.token_cap))
        self._precision.want(self._governed.measures)
        return decision

    def _write(self, line: dict[str, Any]) -> dict[str, Any]:
        written = append_metrics(self.run_dir, {**line, "time_s": round(time.time() - self._started, 3)})
        if self._rollouts is not None:
            self._rollouts.samples.write(line["step"], scheme=line["scheme"])
        return written

    # the end

    def on_train_end(self) -> None:
        """verl comes here when no step was left: the last one's validation may be missing (run/last_line.py)."""
        super().on_train_end()
        checkpoint = Path(self.plan.resume_from) if self.plan.resume_from else None
        line = owed_line(self.run_dir, checkpoint=checkpoint, plan=self.plan)
        if line is None:
            return
        self.global_steps = self.plan.steps  # verl has counted on
        started, scheme = time.perf_counter(), self._precision.live.label
        self.on_validate_begin()
        self._validate()
        self.on_validate_end()
        seconds = round(time.perf_counter() - started, 4)
        append_metrics(self.run_dir, {**line, "validate_s": seconds, **self._validation})
        if self._rollouts is not None:
            self._rollouts.samples.write(self.plan.steps, scheme=scheme)

    def export_model(self) -> None:
        """`model/`: what the last checkpoint holds, see trainer/export.py."""
        self._phase("export")
        export_checkpoint(
            checkpoint_folder(self.run_dir, step=self.plan.steps), target=self.run_dir / "model", uaq=self.plan.uaq
        )

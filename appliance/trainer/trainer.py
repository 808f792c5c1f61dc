"""verl's PPOTrainerSync plus phase events, sync verification, metrics and export.

Nothing of the algorithm is changed here. Each of verl's hooks is here once, in the order in which verl calls them, and
says in which order the parts do their work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.rollout.llm_server import LLMServerManager

from appliance.corrections.objective import Aggregate
from appliance.errors import ApplianceError, GuardStop, RecipeError, TrainingError
from appliance.guard.signals import Signals
from appliance.quant.kv_scales import Pairs
from appliance.quant.mismatch import DifferingToken
from appliance.record.checkpoints import checkpoint_folder, owed_line
from appliance.record.code import attested_code
from appliance.record.events import append_event, run_started
from appliance.record.plan import RunPlan
from appliance.tasks.library import too_few_problems
from appliance.terms.phases import Phase
from appliance.terms.settings import KvCache, OldLogProbs
from appliance.trainer.attest import (
    SEARCH_EVERY,
    attest_driver,
    attest_switch,
    attest_trainers,
    check_attested,
    find_differing,
    take_settings,
    tell_layer,
)
from appliance.trainer.checkpoints import Checkpoints, at_its_place, read_state
from appliance.trainer.correction import BatchCorrection, gdpo_weights, with_gdpo, without_advantage
from appliance.trainer.engines import RolloutEngines
from appliance.trainer.export import export_checkpoint
from appliance.trainer.governor import Governor, guard_stop, signals_of
from appliance.trainer.kv_scales import KvScaleUpdates
from appliance.trainer.metrics import (
    RATE,
    StepParts,
    StepTelemetry,
    append_metrics,
    keeping_fetched,
    mean_entropy,
    measure_step,
    measure_update,
    metrics_left_out,
    step_metrics,
    tell_differing,
    tracked_numbers,
    write_old_log_probs,
)
from appliance.trainer.precision import RolloutPrecision, Validation, WeightUpdates
from appliance.trainer.replay_buffer import DynamicSampling, choose_in_order, wait_for_rollouts
from appliance.trainer.rewards import RewardFaults
from appliance.trainer.rollouts import Rollouts
from appliance.trainer.stopping import StopAsked, Stopping
from appliance.trainer.update_log_probs import ForwardLogProbs, rows_by_key, take_update_log_probs

BY_THE_GUARD = "stopped by the guard"


class ApplianceTrainer(PPOTrainerSync):
    """One attempt of a run: `init`, `fit`, `export_model`; `save_and_stop` after a StopAsked."""

    checkpoints: Checkpoints
    """Checkpoints of the run, once the model is loaded: `on_init_end`."""

    rollouts: Rollouts
    """Rollouts, given to `fit`."""

    _rate: float
    """Learning rate of the next updates, from `on_init_end` on."""

    def __init__(
        self,
        *,
        config: DictConfig,
        plan: RunPlan,
        stopping: Stopping,
        on_engine_death: Callable[[ApplianceError], None],
    ) -> None:
        """on_engine_death: called on another thread, with what happened; see EngineWatch."""
        super().__init__(config)
        self.plan = plan
        self.run_dir = Path(plan.run_dir)
        self.stopping = stopping
        self.governor = Governor(plan)
        self.precision = RolloutPrecision(plan)
        as_saved = plan.resume_from and not self.governor.had_stopped
        saved = read_state(Path(plan.resume_from)).precision if as_saved else None
        self.precision.begin(self.governor.measures, saved=saved)
        self.engines = RolloutEngines(self.run_dir, precision=self.precision.starts_in, on_death=on_engine_death)
        self.kv_scales: KvScaleUpdates | None = None
        if plan.rollout.kv_cache is KvCache.FP8:
            self.kv_scales = KvScaleUpdates(self.run_dir, servers=lambda: self.llm_server_manager.server_handles)
        self.updates = WeightUpdates(
            plan,
            precision=self.precision,
            engines=self.engines,
            restart=self._restart_engines,
            attest=lambda: attest_switch(plan, workers=self.actor_rollout_wg.workers),
            is_leaving=lambda: stopping.is_requested,
            after=self.kv_scales.after_update if self.kv_scales is not None else None,
        )
        self.validation = Validation(plan, precision=self.precision, check_stop=stopping.check)
        self.correction = BatchCorrection(plan)
        self._search_from = 0  # the next step in which a layer may be searched for
        self.reward_faults = RewardFaults(self.run_dir, most=plan.guard.reward_failures)
        self.sampling = DynamicSampling(at_first=plan.batch.prompts_per_step, max_prompts=plan.max_generated_prompts)
        self.replay_buffer.refill_fn = self.sampling.limited(self.replay_buffer.refill_fn)
        self._started = run_started(self.run_dir)
        self._phase = Phase.START
        self._step = StepParts(self.precision.live)
        self._stop_after_step: GuardStop | None = None

    def _begin_phase(self, phase: Phase) -> None:
        self._phase = phase
        append_event(self.run_dir, kind="phase", what=str(phase))

    # start-up

    def _setup(self) -> None:
        self._begin_phase(Phase.LOAD_MODEL)
        super()._setup()

    def _init_dataloader(self) -> None:
        """Check that there are enough problems: the cache's may be those of a run with fewer prompts a step."""
        super()._init_dataloader()
        if too_few := too_few_problems(len(self.train_dataset), prompts_per_step=self.plan.batch.prompts_per_step):
            raise RecipeError(too_few)

    def on_init_end(self) -> None:
        self.checkpoints = self._open_checkpoints()
        self.engines.watch(self.llm_server_manager.server_handles)
        self._rate = take_settings(self.plan, workers=self.actor_rollout_wg.workers)
        self._begin_phase(Phase.ATTEST)
        self.correction.install(self.actor_rollout_wg, actor=self.config.actor_rollout_ref.actor)
        attest_driver(self.plan, algorithm=self.config.algorithm)
        attest_trainers(self.plan, workers=self.actor_rollout_wg.workers)
        check_attested(self.plan, precision=self.engines.generation.precision)
        self._begin_phase(Phase.SYNC)
        self.checkpoint_manager.update_weights = self.updates.proven(self.checkpoint_manager.update_weights)
        super().on_init_end()

    def fit(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts
        wait_for_rollouts(self.replay_buffer, rollouts=rollouts, check_stop=self.stopping.check)
        choose_in_order(self.replay_buffer, is_busy=lambda: rollouts.is_busy, looks_early=not self.plan.is_cpu)
        if self.kv_scales is not None:
            first = range(min(len(self.train_dataset), self.plan.batch.prompts_per_step))
            rollouts.step_prompts = [rollouts.prompt_ids(self.train_dataset[row]["raw_prompt"]) for row in first]
            self.kv_scales.begin(rollouts, sync=self.updates.count, saved=self._saved_kv_ranges())
        super().fit(rollouts)

    def _saved_kv_ranges(self) -> Pairs | None:
        """Return the ranges of the checkpoint that the run resumes from; None where rollouts are in another precision
        than theirs."""
        if not self.plan.resume_from:
            return None
        state = read_state(Path(self.plan.resume_from))
        return state.kv_ranges if state.precision == self.precision.state else None

    def on_train_begin(self) -> None:
        """Ask for the guard's measures with the next update: the engines are as at the end of the last step."""
        super().on_train_begin()
        self.precision.want(self.governor.measures)

    # a step

    def on_step_begin(self) -> None:
        self.stopping.check()
        super().on_step_begin()

    def on_sample_begin(self) -> None:
        if self.kv_scales is not None:
            self.kv_scales.check(self.updates.count)
        self._begin_phase(Phase.ROLLOUT)
        self._step = StepParts(self.precision.live)
        super().on_sample_begin()

    def on_sample_end(self) -> None:
        super().on_sample_end()
        attested_code(self.plan)  # a copy that changed is refused by each new process of the pool
        self._step.reward_failures = self._end_rewards(f"step {self.global_steps}")
        self.stopping.check()

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Compute and measure log-probs before the update, unless the update gives them: `_note_update`."""
        source = self.plan.trainer.old_log_probs
        if source is OldLogProbs.UPDATE:
            return batch
        if source is OldLogProbs.ROLLOUT:
            metrics["actor/entropy"] = math.nan  # until the update has reported one
        else:
            self._begin_phase(Phase.LOG_PROBS)
        with keeping_fetched() as fetched:
            batch = super()._compute_old_log_prob(batch, metrics=metrics)
            batch, self._step.telemetry = measure_step(batch, cap=self.correction.token_cap, fetched=fetched.data)
        if source is OldLogProbs.ROLLOUT:
            self._step.fetched = fetched.data  # of measure_step: verl fetched one field
        elif self.plan.algorithm.aggregate is not Aggregate.TOKEN_MEAN:
            metrics["actor/entropy"] = mean_entropy(batch)
        self.stopping.check()
        if self._search_is_due(self._step.telemetry):
            self._search_layer(find_differing(batch), has_moved=False)
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._compute_advantage(batch, metrics=metrics)
        if weights := gdpo_weights(self.plan):
            batch = with_gdpo(batch, parts=self.rollouts.grades.reward_parts(batch.keys), weights=weights)
        if ungraded := self.rollouts.grades.take_ungraded(batch.keys, step=self.global_steps):
            batch = without_advantage(batch, places=ungraded)
        if self.plan.trainer.old_log_probs is OldLogProbs.UPDATE:
            return self.correction.send(batch, correction=self.governor.correction)
        return self._prepare_correction(batch)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self.stopping.check()
        self.stopping.begin_change()
        if self._step.telemetry is not None and self._step.telemetry.nonfinite_fraction:
            metrics.update(metrics_left_out(self.run_dir, telemetry=self._step.telemetry, step=self.global_steps))
            return batch
        self._begin_phase(Phase.UPDATE)
        self.checkpoints.begin_update()
        batch = super()._update_actor(batch, metrics=metrics)
        self._rate, metrics[RATE] = metrics[RATE], self._rate  # verl reports the next step's
        if self.plan.trainer.old_log_probs is OldLogProbs.ROLLOUT:
            self._measure_update(batch, metrics)
        if self.plan.trainer.old_log_probs is OldLogProbs.UPDATE:
            batch = self._note_update(batch, metrics)
            if self._step.telemetry.nonfinite_fraction:
                return batch
        self.correction.after_update(
            batch, step=self.global_steps, reported=metrics, log_probs=self.actor_rollout_wg.compute_log_prob
        )
        return batch

    def _measure_update(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> None:
        """Measure log-probs of the first update against the rollouts': its weights were still those that sampled."""
        sequences = self.plan.batch.mini_batch_prompts * self.plan.rollout.samples_per_prompt
        forwards = self._take_update_log_probs()
        telemetry, metrics["actor/entropy"] = measure_update(
            self._step.telemetry,
            keys=batch.keys,
            fetched=self._step.fetched,
            forwards=forwards,
            sequences=sequences,
            cap=self.correction.token_cap,
        )
        self._step.telemetry, self._step.fetched = telemetry, None
        if self._search_is_due(telemetry):
            rows = rows_by_key(forwards, keys=batch.keys, sequences=sequences)
            self._step.differing = find_differing(batch, update_rows=rows)

    def _note_update(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Complete batch, mismatch and correction after an update that gave the old log-probs, as a pass before it
        would have left them. Raises TrainingError when the update was made with log-probs that are not finite."""
        batch, fetched = write_old_log_probs(batch, forwards=self._take_update_log_probs())
        metrics["actor/entropy"] = mean_entropy(batch, fetched=fetched)
        batch, self._step.telemetry = measure_step(batch, cap=self.correction.token_cap, fetched=fetched)
        if self._step.telemetry.nonfinite_fraction:
            if math.isfinite(metrics["actor/grad_norm"]):
                what = f"step {self.global_steps} was learned from log-probabilities that are not finite"
                raise TrainingError(what, hint="report it with the log; trainer.old_log_probs: recompute prevents it")
            metrics.update(metrics_left_out(self.run_dir, telemetry=self._step.telemetry, step=self.global_steps))
        return self._prepare_correction(batch)

    def _prepare_correction(self, batch: KVBatchMeta) -> KVBatchMeta:
        batch = self.correction.prepare(batch, step=self.global_steps, correction=self.governor.correction)
        self._step.correction = self.correction.metrics()
        return batch

    def _take_update_log_probs(self) -> list[ForwardLogProbs]:
        """Take what the forwards of the update gave on all ranks."""
        workers = self.actor_rollout_wg.workers
        held_by_rank = ray.get([worker.__ray_call__.remote(take_update_log_probs) for worker in workers])
        return list(chain(*held_by_rank))

    def on_step_end(self) -> None:
        self._begin_phase(Phase.SYNC)
        before = self.engines.restart_s
        super().on_step_end()
        self.timing_raw["update_weights"] -= self.engines.restart_s - before
        self._step.sync = self.updates.last
        if self.kv_scales is not None:
            self._step.kv_scales = self.kv_scales.metrics()
        if self._step.differing is not None:
            self._search_layer(self._step.differing, has_moved=True)

    def _validate(self) -> dict[str, float]:
        """Validate. A validation that is cut short is left out of its step's line: the step itself is finished and
        kept."""
        try:
            self.stopping.check()
            self._begin_phase(Phase.VALIDATE)
            values = self.validation.make(
                super()._validate,
                step=self.global_steps,
                problems=lambda: self.rollouts.grades.num_validated,
                by_set=self.rollouts.grades.set_metrics,
                update=lambda: self.checkpoint_manager.update_weights(self.global_steps),
            )
        except StopAsked:
            if self.global_steps == self.stopping.finished:  # no step waits for its line
                raise
            return {}
        if self.global_steps == 0:
            self._write({"step": 0, "scheme": self.validation.scheme, **self.validation.take()})
        try:
            self._end_rewards(f"the validation of step {self.global_steps}")
        except GuardStop as error:
            if self.global_steps == 0:
                raise
            self._stop_after_step = error  # the step's weights have moved: it is written down first, and saved
        return tracked_numbers(values) if self.plan.task.val_sets else values

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        line = step_metrics(self._step, verl=metrics, timing_s=timing_raw, plan=self.plan, number=global_steps)
        line |= self.engines.take_restart() | self._step.rolled.metrics() | self.governor.metrics()
        if self.plan.algorithm.filters:
            line |= self.sampling.end_step(metrics, rollouts=self.rollouts, rollout_s=timing_raw["gen"])
        line |= self._step.kv_scales
        if self.plan.task.is_own:
            line |= self.rollouts.grades.reward_means(batch.keys, step=global_steps)
        telemetry, is_exact, cap = self._step.telemetry, self._step.is_exact(self.plan), self.correction.token_cap
        line |= telemetry.metrics(is_exact=is_exact, cap=cap) | self.validation.take() | self.rollouts.take_counts()
        written = self._write({**line, "reward_failures": self._step.reward_failures})
        metrics.update(tracked_numbers(written))  # verl sends `metrics` to the backends next
        if is_exact and telemetry.differing_tokens:
            tell_differing(self.run_dir, telemetry=telemetry, step=global_steps)
        signals = signals_of(line, telemetry=telemetry, cap=cap, is_exact=is_exact)
        self._end_step(written, signals=signals)

    # the end

    def on_train_end(self) -> None:
        """Write the line that the last step may still owe: verl calls this also when no step was left, and its
        validation may be missing (record/checkpoints.py)."""
        super().on_train_end()
        checkpoint = Path(self.plan.resume_from) if self.plan.resume_from else None
        line = owed_line(self.run_dir, checkpoint=checkpoint, plan=self.plan)
        if line is not None:
            self.global_steps = self.plan.trainer.steps  # verl has counted on
            started = time.perf_counter()
            self.on_validate_begin()
            self._validate()
            self.on_validate_end()
            seconds = round(time.perf_counter() - started, 4)
            append_metrics(self.run_dir, {**line, "validate_s": seconds, **self.validation.take()})
            self._write_samples(line)
        if self._stop_after_step is not None:
            raise self._stop_after_step

    def export_model(self) -> None:
        """Write `model/`: what the last checkpoint has, see trainer/export.py."""
        self._begin_phase(Phase.EXPORT)
        last = checkpoint_folder(self.run_dir, step=self.plan.trainer.steps)
        is_served_by_model = self.plan.trainer.one_flow and not self.plan.model.lora
        flow = self.plan.engines[0] if is_served_by_model else None
        export_checkpoint(
            last,
            target=self.run_dir / "model",
            uaq=self.plan.uaq,
            model=self.plan.model,
            weights=self.plan.weights,
            flow=flow,
            provenance=self.plan.weights.provenance,
        )

    def save_and_stop(self) -> ApplianceError:
        """Save the last finished step, if it is not saved yet. Between two steps that is what the workers hold: a step
        that has begun has changed nothing but the position in the data until its update (trainer/checkpoints.py).

        Returns the error that ends this process: SavedAndStopped or Interrupted.
        """
        if self.stopping.finished != self.stopping.saved:
            self.rollouts.abandon()
            self.checkpoints.save_now(f"stopped by {self.stopping.why}")
            self.stopping.note_saved(self.checkpoints.saved_step)
        return self.stopping.leave()

    # what the hooks share

    def _open_checkpoints(self) -> Checkpoints:
        """Open the run's checkpoints, and restore the driver's part of the one that the weights were loaded from."""
        data_state = self.train_dataloader.state_dict
        opened = Checkpoints(self.plan, save_workers=self._save_workers, data_state=data_state)
        if self.plan.resume_from:
            self.train_dataloader_it = at_its_place(self.train_dataloader)  # draws from the random state put back next
            opened.restore(Path(self.plan.resume_from))
        return opened

    def _save_workers(self, folder: Path, step: int) -> None:
        self.actor_rollout_wg.save_checkpoint(str(folder / "actor"), None, step, max_ckpt_to_keep=None)

    def _restart_engines(self, why: str) -> None:
        """Start new rollout engines in place of the present ones, in the precision that is wanted, and check what they
        attest; a weight update must follow. Raises EngineError, AttestationError."""
        phase_before = self._phase
        self._begin_phase(Phase.RESTART_ENGINES)
        self.rollouts.finish()  # still watched: one that dies ends the wait
        old = self.llm_server_manager
        self.llm_server_manager, restart = self.engines.restart(
            old,
            precision=self.precision.starts_in,
            after_sync=self.updates.count,
            start=lambda: LLMServerManager.create(
                config=self.config, worker_group=self.actor_rollout_wg, rollout_resource_pool=old.rollout_resource_pool
            ),
        )
        self.checkpoint_manager.remove_replicas(old.get_replicas())
        self.checkpoint_manager.add_replicas(self.llm_server_manager.get_replicas())
        self.checkpoint_manager.sleep_replicas()  # as verl does with the first ones: an update wakes them
        self.rollouts.engines.serve_by(self.llm_server_manager.server_handles)
        attest_trainers(self.plan, workers=self.actor_rollout_wg.workers)
        check_attested(self.plan, precision=self.engines.generation.precision)
        append_event(self.run_dir, kind="note", what=restart.text, why=why, **restart.numbers())
        self._begin_phase(phase_before)

    def _search_is_due(self, telemetry: StepTelemetry) -> bool:
        """Tell whether to search for the layer that makes log-probs of this step differ from the rollouts', which they
        are to equal."""
        differs = telemetry.differing_tokens and not telemetry.nonfinite_fraction
        return bool(differs) and self._step.is_exact(self.plan) and self.global_steps >= self._search_from

    def _search_layer(self, differing: DifferingToken, *, has_moved: bool) -> None:
        """Search while trainer and engines have the same weights: before an update, or, where its forward has shown
        the difference, after the weight update that follows it."""
        self._search_from = self.global_steps + SEARCH_EVERY
        self.rollouts.finish()
        tell_layer(
            differing,
            plan=self.plan,
            step=self.global_steps,
            workers=self.actor_rollout_wg.workers,
            servers=self.llm_server_manager.server_handles,
            has_moved=has_moved,
        )

    def _end_rewards(self, responses: str) -> int:
        """Judge the rewards, and return how many failed. Raises GuardStop, after the last finished step is saved:
        none is learnt from rewards that failed."""
        try:
            return self.reward_faults.end(responses, pool=self.rollouts.pool)
        except GuardStop:
            self.checkpoints.save_now(BY_THE_GUARD)
            raise

    def _write(self, line: dict[str, Any]) -> dict[str, Any]:
        written = append_metrics(self.run_dir, {**line, "time_s": round(time.time() - self._started, 3)})
        self._write_samples(line)
        return written

    def _write_samples(self, line: dict[str, Any]) -> None:
        self.rollouts.samples.write(line["step"], scheme=line["scheme"], val_scheme=self.validation.scheme)

    def _end_step(self, line: dict[str, Any], *, signals: Signals) -> None:
        """Have a step that is written down judged, and save it when it is due. Raises GuardStop, after the step is
        saved, and StopAsked."""
        decision = self.governor.after_step(signals)
        self.precision.want(self.governor.measures)
        is_last = self.global_steps >= self.plan.trainer.steps
        kv_ranges = self.kv_scales.ranges if self.kv_scales is not None else None
        self.checkpoints.end_step(line, precision=self.precision.state, kv_ranges=kv_ranges, is_last=is_last)
        if decision is not None:
            raise guard_stop(decision, saved=self.checkpoints.save_now(BY_THE_GUARD))
        if self.precision.restarts_in(self.global_steps + 1, present=self.engines.generation.precision):
            self.checkpoints.save_now("new rollout engines are next")  # which may fail: the run then resumes from here
        if self._stop_after_step is not None:
            self.checkpoints.save_now(BY_THE_GUARD)
            raise self._stop_after_step
        self.stopping.end_step(self.global_steps, saved=self.checkpoints.saved_step)
        self.stopping.check()

"""Our trainer, hook by hook: which part does its work when. verl's own work is left out everywhere; the constructor and
what a test is about are the real ones."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plans import make_algorithm, make_checkpoint, make_plan
from trainers import make_trainer
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from appliance.corrections.registry import correction_of
from appliance.errors import AttestationError, GuardStop, RecipeError, TrainingError
from appliance.record.attestations import Attestation, fingerprint, write_attestation
from appliance.record.checkpoints import checkpoint_folder, read_manifest
from appliance.record.plan import ExpectedAttestation
from appliance.terms.schemes import AS_PLANNED, Precision, Scheme
from appliance.terms.settings import OldLogProbs
from appliance.trainer import trainer as room
from appliance.trainer.checkpoints import Checkpoints
from appliance.trainer.metrics import StepParts
from appliance.trainer.precision import BF16, Live, PrecisionState
from appliance.trainer.stopping import StopAsked
from appliance.trainer.trainer import ApplianceTrainer

BATCH = KVBatchMeta(keys=["a_0_0", "a_1_0"], tags=[{}, {}], partition_id="train", fields=[])
VALIDATED = {"val-core/arithmetic/reward/mean@1": 0.75}
INT8 = Live("int8", emulated=False)


class Part:
    """Stands for a part of the trainer: writes down which of its methods are called. values: what they return."""

    def __init__(self, name: str, calls: list[str], **values: Any) -> None:
        self._name, self._calls, self._values = name, calls, values

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> Any:
            self._calls.append(f"{self._name}.{method}")
            value = self._values.get(method)
            if isinstance(value, Exception):
                raise value
            return value

        return call


class Stop(Part):
    """A request to stop that comes when a test says. finished: the last step whose line is written."""

    is_requested, finished, saved, why = False, 0, 0, "SIGTERM"


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def trainer(tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> ApplianceTrainer:
    """In its third step of four, every part of it replaced by one that only says what it was asked to do."""
    hooks = ("on_init_end", "on_train_begin", "on_step_begin", "on_sample_begin", "on_sample_end", "on_step_end")
    for hook in hooks:
        monkeypatch.setattr(PPOTrainerSync, hook, lambda self: calls.append("verl"))
    for step in ("_compute_old_log_prob", "_compute_advantage"):
        monkeypatch.setattr(PPOTrainerSync, step, lambda self, batch, metrics: calls.append("verl") or batch)

    def update(self: ApplianceTrainer, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        calls.append("verl")
        metrics["actor/lr"] = 4e-4  # after it, of the step that follows
        return batch

    monkeypatch.setattr(PPOTrainerSync, "_update_actor", update)
    monkeypatch.setattr(PPOTrainerSync, "_compute_metrics", lambda *_, **__: calls.append("verl"))
    monkeypatch.setattr(PPOTrainerSync, "_validate", lambda self: calls.append("verl") or VALIDATED)
    monkeypatch.setattr(room, "append_event", lambda run_dir, *, kind, what, **_: calls.append(f"{kind} {what}"))

    @contextmanager
    def keeping_fetched() -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(data=None)

    monkeypatch.setattr(room, "keeping_fetched", keeping_fetched)
    telemetry = SimpleNamespace(nonfinite_fraction=0.0, differing_tokens=0, mismatch=None, metrics=lambda **_: {})
    results = {
        **{
            name: None for name in ("attest_driver", "attest_trainers", "check_attested", "attested_code", "signals_of")
        },
        **{"measure_step": (BATCH, telemetry), "append_metrics": {"step": 3}},
        **{"step_metrics": {"step": 3, "scheme": "int8"}, "guard_stop": GuardStop("stopped"), "take_settings": 3e-4},
    }
    for name, result in results.items():
        monkeypatch.setattr(room, name, lambda *_, _name=name, _result=result, **__: calls.append(_name) or _result)
    made_trainer = make_trainer(make_plan(tmp_path, steps=4), stopping=Stop("stopping", calls))
    made_trainer.global_steps = 3
    made_trainer._open_checkpoints = lambda: Part("checkpoints", calls)
    made_trainer.checkpoints = Part("checkpoints", calls)
    made_trainer.governor = Part("governor", calls, metrics={})
    made_trainer.precision = Part("precision", calls)
    made_trainer.precision.live, made_trainer.precision.state = INT8, None
    made_trainer.engines = Part("engines", calls, take_restart={})
    made_trainer.engines.restart_s, made_trainer.engines.generation = 0.0, SimpleNamespace(precision=AS_PLANNED)
    made_trainer.updates = Part("updates", calls)
    made_trainer.updates.last = "proven"
    made_trainer.validation = Part("validation", calls, make=VALIDATED, take={})
    made_trainer.validation.scheme = "int8"
    made_trainer.correction = Part("correction", calls, prepare=BATCH, send=BATCH, metrics={})
    made_trainer.correction.token_cap = 2.0
    made_trainer.reward_faults = Part("reward_faults", calls, end=2)
    made_trainer.actor_rollout_wg = SimpleNamespace(workers=[], compute_log_prob=None)
    made_trainer.llm_server_manager = SimpleNamespace(server_handles=[])
    made_trainer.checkpoint_manager = SimpleNamespace(update_weights=None)
    pool = SimpleNamespace(graded=0, faults=Counter(), last_fault=None)
    grades = SimpleNamespace(num_validated=0, set_metrics=dict, take_ungraded=lambda keys, *, step: set())
    made_trainer.rollouts = SimpleNamespace(pool=pool, samples=Part("samples", calls), grades=grades, take_counts=dict)
    made_trainer.timing_raw = {"update_weights": 1.0}
    made_trainer._step = StepParts(INT8, telemetry=telemetry)
    made_trainer._rate = 3e-4
    return made_trainer


@pytest.mark.parametrize("problems", [31, 32])
def test_problems_that_do_not_fill_a_step_end_the_run_before_the_model_is_loaded(
    trainer: ApplianceTrainer, monkeypatch: pytest.MonkeyPatch, problems: int
) -> None:
    """A cache that a run with smaller steps has filled: verl would divide by the 0 steps of an epoch, minutes later."""
    monkeypatch.setattr(
        PPOTrainerSync, "_init_dataloader", lambda self: setattr(self, "train_dataset", range(problems))
    )
    if problems == 32:
        return trainer._init_dataloader()
    with pytest.raises(RecipeError) as raised:
        trainer._init_dataloader()
    fact = "task.train_file: 31 problems are left to train on, a step takes 32"
    assert raised.value.problems == [(fact, "lower batch.prompts_per_step, or give more problems")]


ORDERS = {
    "on_init_end": [
        *("engines.watch", "take_settings", "phase attest", "correction.install", "attest_driver", "attest_trainers"),
        *("check_attested", "phase sync", "updates.proven", "verl"),
    ],
    "on_train_begin": ["verl", "precision.want"],
    "on_step_begin": ["stopping.check", "verl"],
    "on_sample_begin": ["phase rollout", "verl"],
    "on_sample_end": ["verl", "attested_code", "reward_faults.end", "stopping.check"],
    "_compute_old_log_prob": ["phase log-probs", "verl", "measure_step", "stopping.check"],
    "_compute_advantage": ["verl", "correction.prepare", "correction.metrics"],
    "_update_actor": [
        *("stopping.check", "stopping.begin_change", "phase update", "checkpoints.begin_update", "verl"),
        "correction.after_update",
    ],
    "on_step_end": ["phase sync", "verl"],
    "_validate": ["stopping.check", "phase validate", "validation.make", "reward_faults.end"],
    "_compute_metrics": [
        *("verl", "step_metrics", "engines.take_restart", "governor.metrics", "validation.take"),
        *("append_metrics", "samples.write", "signals_of", "governor.after_step", "precision.want"),
        *("checkpoints.end_step", "precision.restarts_in", "checkpoints.saved_step", "stopping.end_step"),
        "stopping.check",
    ],
}


def call(trainer: ApplianceTrainer, hook: str) -> Any:
    if hook == "_compute_metrics":
        return trainer._compute_metrics(BATCH, {}, {}, global_steps=3, epoch=0)
    takes_batch = hook in ("_compute_old_log_prob", "_compute_advantage", "_update_actor")
    return getattr(trainer, hook)(*((BATCH, {}) if takes_batch else ()))


@pytest.mark.parametrize("hook", ORDERS)
def test_the_parts_do_their_work_in_this_order(trainer: ApplianceTrainer, calls: list[str], hook: str) -> None:
    trainer.checkpoints.saved_step = 3
    call(trainer, hook)
    assert calls == [each for each in ORDERS[hook] if each != "checkpoints.saved_step"]


RANGES = {"model.layers.0.self_attn.attn": (12.0, 0.5)}


def test_scales_of_keys_are_checked_before_rollouts_and_saved_with_the_step(
    trainer: ApplianceTrainer, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.kv_scales = Part("kv_scales", calls, metrics={"kv_range_drift": 0.25})
    trainer.kv_scales.ranges = RANGES
    trainer.on_step_end()
    lines, saved = [], []
    monkeypatch.setattr(room, "append_metrics", lambda run_dir, line: lines.append(line) or line)
    trainer.checkpoints.end_step = lambda line, **keywords: saved.append(keywords["kv_ranges"])
    trainer.checkpoints.saved_step = 3
    call(trainer, "_compute_metrics")
    assert [line["kv_range_drift"] for line in lines] == [0.25] and saved == [RANGES]
    calls.clear()
    trainer.on_sample_begin()
    assert calls == ["kv_scales.check", "phase rollout", "verl"]


@pytest.mark.parametrize(("rollouts", "expected"), [(AS_PLANNED, RANGES), (BF16, None)])
def test_a_resumed_run_takes_the_scales_of_its_checkpoint_where_rollouts_are_in_its_precision(
    trainer: ApplianceTrainer, monkeypatch: pytest.MonkeyPatch, rollouts: Precision, expected: object
) -> None:
    """Scales that were measured on INT8 weights are not those of BF16 weights."""
    saved = PrecisionState("int8", AS_PLANNED, AS_PLANNED, Scheme.INT8, 0.0)
    state = SimpleNamespace(kv_ranges=RANGES, precision=saved)
    monkeypatch.setattr(room, "read_state", lambda folder: {"/a/global_step_2": state}[str(folder)])
    trainer.precision.state = dataclasses.replace(saved, rollouts=rollouts)
    assert trainer._saved_kv_ranges() is None  # of a run that starts
    trainer.plan = trainer.plan.replace(resume_from="/a/global_step_2")
    assert trainer._saved_kv_ranges() == expected


@pytest.mark.parametrize(("differing", "broken", "searched"), [(0, 0.0, 0), (1, 0.0, 1), (1, 0.25, 0)])
def test_a_layer_is_searched_for_where_all_log_probs_are_finite(
    trainer: ApplianceTrainer, monkeypatch: pytest.MonkeyPatch, differing: int, broken: float, searched: int
) -> None:
    """A step with others is left out: both sides of its batch have been made equal."""
    found = SimpleNamespace(nonfinite_fraction=broken, differing_tokens=differing)
    monkeypatch.setattr(room, "measure_step", lambda *_, **__: (BATCH, found))
    searches = searched_layers(trainer, monkeypatch)
    trainer._compute_old_log_prob(BATCH, {})
    trainer.global_steps += 1
    trainer._compute_old_log_prob(BATCH, {})  # once in so many steps
    assert searches == [(BATCH, None, 3, False)] * searched


def searched_layers(trainer: ApplianceTrainer, monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What of each search: batch, log-probs held of an update, step, whether the weights have moved."""
    searches: list[tuple[object, ...]] = []
    monkeypatch.setattr(type(trainer._step), "is_exact", lambda *_: True)
    monkeypatch.setattr(room, "find_differing", lambda batch, *, update_rows=None: (batch, update_rows))
    monkeypatch.setattr(
        room, "tell_layer", lambda found, *, step, has_moved, **_: searches.append((*found, step, has_moved))
    )
    trainer.rollouts.finish = lambda: None
    return searches


def take_from(source: OldLogProbs, trainer: ApplianceTrainer) -> None:
    trainer.plan = trainer.plan.replace(trainer=trainer.plan.trainer.replace(old_log_probs=source))


def give_forwards(trainer: ApplianceTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, each of which answers with its function's name."""
    worker = SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda what: [what.__name__]))
    monkeypatch.setattr(room.ray, "get", lambda answers: answers)
    trainer.actor_rollout_wg.workers = [worker, worker]


AS_WITH_A_PASS = ["write_old_log_probs", "mean_entropy", "measure_step", "correction.prepare", "correction.metrics"]


@pytest.mark.parametrize(("broken", "norm"), [(0.0, 1.0), (0.25, math.nan), (0.25, 1.0)])
def test_an_update_that_gives_the_old_log_probs_is_measured_after_it_as_a_pass_before_it(
    trainer: ApplianceTrainer, calls: list[str], monkeypatch: pytest.MonkeyPatch, broken: float, norm: float
) -> None:
    """And a step whose log-probs are not finite is left out by its gradient, which must then be NaN."""
    take_from(OldLogProbs.UPDATE, trainer)
    give_forwards(trainer, monkeypatch)
    telemetry = SimpleNamespace(nonfinite_fraction=broken)

    def step(name: str, result: object) -> None:
        monkeypatch.setattr(room, name, lambda *_, **how: calls.append(name) or arguments.update(how) or result)

    arguments: dict[str, Any] = {}
    step("write_old_log_probs", (BATCH, None))
    step("mean_entropy", 0.25)
    step("measure_step", (BATCH, telemetry))
    step("metrics_left_out", {"actor/grad_norm": math.nan, "actor/lr": math.nan})
    metrics = {"actor/grad_norm": norm}
    assert trainer._compute_old_log_prob(BATCH, {}) is BATCH and calls == []
    trainer._compute_advantage(BATCH, {})
    assert calls == ["verl", "correction.send"]
    calls.clear()
    begin = ["stopping.check", "stopping.begin_change", "phase update", "checkpoints.begin_update", "verl"]
    if broken and math.isfinite(norm):
        with pytest.raises(TrainingError, match="step 3 was learned from log-probabilities that are not finite"):
            trainer._update_actor(BATCH, metrics)
        return
    trainer._update_actor(BATCH, metrics)
    assert arguments["forwards"] == ["take_update_log_probs"] * 2 and arguments["cap"] == 2.0
    assert (trainer._step.telemetry, metrics["actor/entropy"]) == (telemetry, 0.25)
    if broken:
        assert calls == [*begin, *AS_WITH_A_PASS[:3], "metrics_left_out", *AS_WITH_A_PASS[3:]]
        assert math.isnan(metrics["actor/lr"]) and trainer._rate == 4e-4
    else:
        assert calls == [*begin, *AS_WITH_A_PASS, "correction.after_update"]


def test_without_a_pass_there_is_no_phase_of_it_and_no_entropy_yet(trainer: ApplianceTrainer, calls: list[str]) -> None:
    take_from(OldLogProbs.ROLLOUT, trainer)
    metrics: dict[str, float] = {}
    trainer._compute_old_log_prob(BATCH, metrics)
    assert calls == ["verl", "measure_step", "stopping.check"]
    assert list(metrics) == ["actor/entropy"] and math.isnan(metrics["actor/entropy"])


def test_without_a_pass_the_update_is_the_proof(
    trainer: ApplianceTrainer, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all ranks, at once: the shadow pass and whatever else comes later is of other weights."""
    take_from(OldLogProbs.ROLLOUT, trainer)
    before, measured, arguments = trainer._step.telemetry, SimpleNamespace(differing_tokens=0), {}

    def measure_update(step: object, **how: object) -> tuple[object, float]:
        calls.append("measure_update")
        arguments.update(how, step=step)
        return measured, 0.25

    monkeypatch.setattr(room, "measure_update", measure_update)
    give_forwards(trainer, monkeypatch)
    metrics = {"actor/entropy": math.nan}
    trainer._update_actor(BATCH, metrics)
    assert calls[-3:] == ["verl", "measure_update", "correction.after_update"]
    assert (trainer._step.telemetry, metrics["actor/entropy"]) == (measured, 0.25)
    sequences = trainer.plan.batch.mini_batch_prompts * trainer.plan.rollout.samples_per_prompt
    of_step = {"step": before, "fetched": trainer._step.fetched, "keys": BATCH.keys}
    assert arguments == {**of_step, "forwards": ["take_update_log_probs"] * 2, "sequences": sequences, "cap": 2.0}


@pytest.mark.parametrize(("differing", "broken", "searched"), [(0, 0.0, 0), (1, 0.0, 1), (1, 0.25, 0)])
def test_what_differs_in_an_update_is_searched_for_after_the_weight_update_that_follows_it(
    trainer: ApplianceTrainer,
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
    differing: int,
    broken: float,
    searched: int,
) -> None:
    """Before that the trainer has other weights than the engines."""
    take_from(OldLogProbs.ROLLOUT, trainer)
    give_forwards(trainer, monkeypatch)
    found = SimpleNamespace(nonfinite_fraction=broken, differing_tokens=differing)
    monkeypatch.setattr(room, "measure_update", lambda *_, **__: (found, 0.25))
    monkeypatch.setattr(room, "rows_by_key", lambda *_, **__: "rows")
    searches = searched_layers(trainer, monkeypatch)
    monkeypatch.setattr(PPOTrainerSync, "on_step_end", lambda self: calls.append(f"sync {len(searches)}"))
    trainer._update_actor(BATCH, {"actor/entropy": math.nan})
    trainer.on_step_end()
    assert calls[-1] == "sync 0" and searches == [(BATCH, "rows", 3, True)] * searched


def test_every_hook_of_verls_is_overridden_once_and_by_name() -> None:
    """A hook that verl renames would not be called any more."""
    ours = {
        name
        for name in vars(ApplianceTrainer)
        if callable(getattr(ApplianceTrainer, name)) and not name.startswith("__")
    }
    hooks = {*ORDERS, "_setup", "_init_dataloader", "fit", "on_train_end"}
    assert {name for name in ours if hasattr(PPOTrainerSync, name)} == hooks
    assert ApplianceTrainer.__bases__ == (PPOTrainerSync,)


@pytest.mark.parametrize("hook", ["on_step_begin", "_compute_old_log_prob", "_update_actor", "on_sample_end"])
def test_a_request_to_stop_leaves_the_step_there(trainer: ApplianceTrainer, calls: list[str], hook: str) -> None:
    trainer.stopping = Stop("stopping", calls, check=StopAsked())
    with pytest.raises(StopAsked):
        call(trainer, hook)
    assert calls == ORDERS[hook][: ORDERS[hook].index("stopping.check") + 1]


def test_a_step_that_is_not_finite_moves_no_weights(trainer: ApplianceTrainer, calls: list[str]) -> None:
    trainer._step.telemetry = SimpleNamespace(nonfinite_fraction=0.25)
    metrics: dict[str, float] = {}
    assert trainer._update_actor(BATCH, metrics) is BATCH
    assert calls == ["stopping.check", "stopping.begin_change"]
    assert {name for name, value in metrics.items() if math.isnan(value)} == {
        *("actor/pg_clipfrac", "actor/grad_norm", "actor/lr")
    }


def test_a_step_has_the_rate_of_its_own_updates(trainer: ApplianceTrainer) -> None:
    trainer.on_init_end()
    rates = []
    for _ in range(2):
        trainer._update_actor(BATCH, metrics := {})
        rates.append(metrics["actor/lr"])
    assert rates == [3e-4, 4e-4]


def test_a_validation_that_is_cut_is_left_out_of_its_step(trainer: ApplianceTrainer, calls: list[str]) -> None:
    trainer.stopping = Stop("stopping", calls, check=StopAsked())
    assert trainer._validate() == {}
    assert calls == ["stopping.check"]
    trainer.stopping.finished = 3  # no step waits for its line
    with pytest.raises(StopAsked):
        trainer._validate()


def test_rewards_that_fail_stop_the_run_before_they_are_learnt_from(
    trainer: ApplianceTrainer, calls: list[str]
) -> None:
    trainer.reward_faults = Part("reward_faults", calls, end=GuardStop("too many"))
    with pytest.raises(GuardStop, match="too many"):
        trainer.on_sample_end()
    assert calls == ["verl", "attested_code", "reward_faults.end", "checkpoints.save_now"]


def test_rewards_that_fail_in_a_validation_stop_the_run_when_its_step_is_saved(
    trainer: ApplianceTrainer, calls: list[str]
) -> None:
    """Before the first step there is none to wait for."""
    trainer.reward_faults = Part("reward_faults", calls, end=GuardStop("too many"))
    assert trainer._validate() == VALIDATED
    calls.clear()
    with pytest.raises(GuardStop, match="too many"):
        call(trainer, "_compute_metrics")
    assert calls[-3:] == ["checkpoints.end_step", "precision.restarts_in", "checkpoints.save_now"]
    trainer.global_steps = 0
    with pytest.raises(GuardStop, match="too many"):
        trainer._validate()


def test_the_guard_stops_the_run_when_its_step_is_saved(trainer: ApplianceTrainer, calls: list[str]) -> None:
    trainer.governor = Part("governor", calls, metrics={}, after_step="a decision")
    with pytest.raises(GuardStop, match="stopped"):
        call(trainer, "_compute_metrics")
    assert calls[-3:] == ["checkpoints.end_step", "checkpoints.save_now", "guard_stop"]


def test_the_step_before_new_engines_is_saved(trainer: ApplianceTrainer, calls: list[str]) -> None:
    trainer.precision = Part("precision", calls)
    trainer.precision.state = None
    trainer.precision.restarts_in = lambda step, present: step == 4  # the next one
    call(trainer, "_compute_metrics")
    assert calls[calls.index("checkpoints.end_step") + 1] == "checkpoints.save_now"


@pytest.mark.parametrize(("finished", "saved", "saves"), [(3, 2, True), (3, 3, False), (0, 0, False)])
def test_what_is_not_saved_yet_is_saved_before_the_end(
    trainer: ApplianceTrainer, calls: list[str], finished: int, saved: int, saves: bool
) -> None:
    trainer.rollouts = Part("rollouts", calls)
    trainer.stopping.finished, trainer.stopping.saved = finished, saved
    trainer.checkpoints.saved_step = 3
    trainer.save_and_stop()
    save = ["rollouts.abandon", "checkpoints.save_now", "stopping.note_saved"] if saves else []
    assert calls == [*save, "stopping.leave"]


def test_new_engines_take_the_place_of_the_old_ones_everywhere(trainer: ApplianceTrainer, calls: list[str]) -> None:
    old, new = (SimpleNamespace(get_replicas=lambda: [], server_handles=[name]) for name in ("old", "new"))
    restart = SimpleNamespace(text="new engines", numbers=dict)
    trainer.engines = Part("engines", calls, restart=(new, restart))
    trainer.engines.generation = SimpleNamespace(precision=AS_PLANNED)
    trainer.llm_server_manager = old
    trainer.rollouts, trainer.checkpoint_manager = Part("rollouts", calls), Part("verls", calls)
    trainer.rollouts.engines = Part("engines", calls)
    trainer.precision.starts_in, trainer.updates.count = AS_PLANNED, 7
    trainer._restart_engines("why")
    assert trainer.llm_server_manager is new
    assert calls == [
        *("phase restart-engines", "rollouts.finish", "engines.restart", "verls.remove_replicas"),
        *("verls.add_replicas", "verls.sleep_replicas", "engines.serve_by", "attest_trainers", "check_attested"),
        *("note new engines", "phase start"),
    ]


def test_a_step_is_corrected_as_the_guard_has_it(
    trainer: ApplianceTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tightened to a cap of 1.5, and the plan has another."""
    arguments: dict[str, Any] = {}
    tight = correction_of("tis", cap=2.0).tightened()
    trainer.correction = SimpleNamespace(
        prepare=lambda batch, **how: arguments.update(how) or batch, metrics=lambda: {"a": 1}
    )
    trainer.governor = SimpleNamespace(correction=tight)
    trainer._compute_advantage(BATCH, metrics={})
    assert arguments == {"step": trainer.global_steps, "correction": tight} and trainer._step.correction == {"a": 1}


def test_what_has_no_grade_teaches_nothing_whatever_the_advantage(
    trainer: ApplianceTrainer, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def neutral(batch: object, *, places: set[int]) -> object:
        calls.append(f"neutral {places}")
        return batch

    monkeypatch.setattr(room, "without_advantage", neutral)
    trainer.rollouts.grades.take_ungraded = lambda keys, *, step: {step}
    trainer._compute_advantage(BATCH, metrics={})
    assert calls == ["verl", "neutral {3}", "correction.prepare", "correction.metrics"]


# with real parts


def test_a_step_may_not_ask_for_prompts_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[int] = []
    monkeypatch.setattr(
        PPOTrainerSync, "_add_prompts_to_generate", lambda self, num_prompts: requests.append(num_prompts)
    )
    dapo = make_algorithm(kind="dapo", max_generation_batches=2)
    trainer = make_trainer(make_plan(tmp_path, algorithm=dapo), stopping=Stop("stopping", []))
    trainer.replay_buffer.refill_fn(32)
    with pytest.raises(TrainingError, match="asked for 65 prompts, and the limit is 64"):
        trainer.replay_buffer.refill_fn(1)
    assert requests == [32]


def test_the_line_of_a_step_is_in_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PPOTrainerSync, "_compute_metrics", lambda *_, **__: None)
    monkeypatch.setattr(room, "step_metrics", lambda *_, **__: {"step": 3, "telemetry_s": 0.25})
    monkeypatch.setattr(room, "signals_of", lambda *_, **__: None)
    plan = make_plan(tmp_path, steps=3, checkpoint=make_checkpoint(keep_best=True))
    calls: list[str] = []
    stopping = Stop("stopping", calls)
    validated = {"val_reward_mean": 0.5, "val_reward_bf16_mean": 0.25, "val_samples": 8, "val_scheme": "bf16"}
    before = PrecisionState("int8", AS_PLANNED, AS_PLANNED, Scheme.INT8, 0.0)
    trainer = make_trainer(
        plan,
        stopping=stopping,
        global_steps=3,
        checkpoints=Checkpoints(plan, save_workers=lambda folder, step: None, data_state=dict),
        governor=SimpleNamespace(metrics=dict, after_step=lambda signals: None, measures=None),
        precision=SimpleNamespace(want=calls.append, state=before, restarts_in=lambda step, present: False),
        validation=SimpleNamespace(take=lambda: validated, scheme="bf16"),
        rollouts=SimpleNamespace(
            samples=SimpleNamespace(
                write=lambda step, *, scheme, val_scheme: calls.append(f"{step} {scheme} {val_scheme}")
            ),
            take_counts=dict,
        ),
    )
    telemetry = SimpleNamespace(metrics=lambda *, is_exact, cap: {"mismatch_chi2": float("inf"), "x": is_exact})
    trainer._step = StepParts(INT8, reward_failures=2, telemetry=telemetry)
    trainer.engines.restart_s = 1.5
    sent: dict[str, Any] = {}
    trainer._compute_metrics(None, sent, {}, global_steps=3, epoch=0)
    (line,) = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    numbers = {key: value for key, value in line.items() if isinstance(value, int | float)}
    assert sent == {f"appliance/{key}": value for key, value in numbers.items()}
    assert line.pop("time_s") >= 0
    assert line == {
        **{"step": 3, "telemetry_s": 0.25, "mismatch_chi2": None, "reward_failures": 2, "engine_restart_s": 1.5},
        **INT8.metrics(),
        **validated,
        "x": False,  # nothing was promised
    }
    folder = checkpoint_folder(tmp_path, step=3)
    kept = json.loads((folder / "state.json").read_text())["line"]
    assert kept.pop("time_s") >= 0 and kept == line
    assert read_manifest(folder).facts.val_reward == 0.5
    assert (
        calls == ["3 int8 bf16", None, "stopping.end_step", "stopping.check"] and trainer.engines.take_restart() == {}
    )


def attested(run_dir: Path, scheme: str) -> None:
    attestation = Attestation(
        process="rollout-0-0",
        role="rollout",
        rank=0,
        scheme=scheme,
        emulated=False,
        patches=(),
        versions={},
        fingerprint=fingerprint(),
    )
    write_attestation(run_dir, attestation)


@pytest.mark.parametrize(
    ("scheme", "problem"),
    [("", "rollout rank 0 did not report what it runs"), ("bf16", "rollout-0-0 runs bf16, the plan says int8")],
)
def test_a_missing_or_different_attestation_ends_the_run_before_any_weights_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, problem: str
) -> None:
    moved: list[int] = []
    plan = make_plan(tmp_path, attestations=(ExpectedAttestation(role="rollout", rank=0, scheme=Scheme.INT8),))
    for name in ("attest_driver", "attest_trainers", "take_settings"):
        monkeypatch.setattr(room, name, lambda *_, **__: None)
    monkeypatch.setattr(ApplianceTrainer, "_open_checkpoints", lambda self: None)
    trainer = make_trainer(
        plan,
        stopping=Stop("stopping", []),
        actor_rollout_wg=SimpleNamespace(workers=[], set_loss_fn=lambda loss: None),
        llm_server_manager=SimpleNamespace(server_handles=[]),
        checkpoint_manager=SimpleNamespace(update_weights=moved.append),
    )
    if scheme:
        attested(tmp_path, scheme)
    with pytest.raises(AttestationError) as raised:
        trainer.on_init_end()
    trainer.engines.stop_watching()
    assert (raised.value.message, raised.value.exit_code, moved) == (problem, 4, [])

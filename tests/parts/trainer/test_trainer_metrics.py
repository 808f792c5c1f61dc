"""From verl's metrics to those of docs/metrics.md, and from a worker's error to an exit code."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from appliance.corrections.objective import KlPlace
from appliance.errors import NumericsError, SyncError, TrainingError
from appliance.quant.mismatch import Mismatch
from appliance.record.events import append_failure
from appliance.sync.records import Acknowledgement, Sent, SyncRecord, Telemetry
from appliance.terms.settings import Dtype, OldLogProbs
from appliance.trainer.entry import report, translate
from appliance.trainer.metrics import StepParts, append_metrics, step_metrics, tracked_numbers
from appliance.trainer.precision import Live, mean_of

MISMATCH = Mismatch(
    k3_kl=1e-4,
    kl=2e-4,
    probs_diff_mean=0.001,
    probs_diff_max=0.01,
    weight_mean=1.0,
    weight_std=0.1,
    weight_max=3.0,
    ess=0.99,
    truncated_fraction=0.01,
)
VERL = {
    "critic/score/mean": 0.5,
    "response_length/mean": 4.0,
    "actor/pg_clipfrac": 0.1,
    "actor/grad_norm": 2.0,
    "actor/entropy": 1.5,
    "actor/lr": 3e-4,
}
TIMINGS_S = {"gen": 2.0, "old_log_prob": 0.5, "update_actor": 1.0, "update_weights": 0.1, "step": 3.7}
TELEMETRY = Telemetry(codes_changed_fraction=0.25, saturated_fraction=0.01, scale_drift=0.001, layer_error_max=0.02)
TAKEN = Acknowledgement(
    sync=4,
    replica=0,
    rank=0,
    manifest="ab",
    tensors=38,
    bytes=1000,
    layers=13,
    layers_proven=13,
    unproven=0,
    parameters_proven=17,
    waiting_bytes=100,
    digest_s=0.5,
    proof_s=0.25,
    seconds=2.0,
    telemetry=TELEMETRY,
)
SYNC = SyncRecord(sent=(Sent(sync=4, replica=0, rank=0, manifest="ab", digest_s=0.125),), acknowledgements=(TAKEN,))
CORRECTED = {"is_truncated_fraction": 0.01}
STEP = StepParts(
    Live("int8", emulated=False),
    telemetry=SimpleNamespace(mismatch=MISMATCH, seconds=0.5),
    correction=CORRECTED,
    sync=SYNC,
)


def trainer_plan(source: OldLogProbs = OldLogProbs.RECOMPUTE, *, dtype: Dtype = Dtype.BF16) -> SimpleNamespace:
    return SimpleNamespace(dtype=dtype, old_log_probs=source)


PLAN = SimpleNamespace(
    batch=SimpleNamespace(prompts_per_step=32),
    task=SimpleNamespace(tools=""),
    algorithm=SimpleNamespace(kl_place=None),
    trainer=trainer_plan(),
    rollout=SimpleNamespace(samples_per_prompt=8, scheme="int8", label="int8"),
    emulates=False,
)


def written(
    verl: dict[str, float], *, plan: object = PLAN, correction: dict[str, float | None] = CORRECTED
) -> dict[str, object]:
    """The line of step 3."""
    step = replace(STEP, correction=correction)
    return step_metrics(step, verl=verl, timing_s=TIMINGS_S, plan=plan, number=3)


def test_tokens_per_second_is_all_generated_tokens_over_the_rollout() -> None:
    line = written(VERL)
    assert line["rollout_tokens_per_s"] == 4.0 * 32 * 8 / 2.0
    assert (line["step"], line["reward_mean"], line["sync_s"], line["is_weight_max"]) == (3, 0.5, 0.1, 3.0)


@pytest.mark.parametrize("source", [OldLogProbs.UPDATE, OldLogProbs.ROLLOUT])
def test_there_are_no_seconds_of_a_pass_that_is_not_made(source: OldLogProbs) -> None:
    plan = SimpleNamespace(**{**vars(PLAN), "trainer": trainer_plan(source)})
    assert (written(VERL)["logprob_s"], written(VERL, plan=plan)["logprob_s"]) == (0.5, 0.0)


def test_the_share_of_clipped_negatives_is_of_the_sums_over_a_step() -> None:
    """None where no token had a negative advantage, and where no update was made."""
    sums = {"actor/negative_tokens": 5.0, "actor/negative_tokens_clipped": 1.25}  # over four mini-batches
    assert written(VERL | sums)["clipped_negative_fraction"] == 0.25
    assert written(VERL | dict.fromkeys(sums, 0.0))["clipped_negative_fraction"] is None
    assert written(VERL)["clipped_negative_fraction"] is None


def test_a_divergence_in_the_loss_is_in_the_line() -> None:
    """A mean over tokens, of the sums over a step. What is in the reward is the correction's to say."""
    reported, place = {"actor/reference_kl": 10.0, "actor/correction_kept": 40.0, "actor/kl_loss": 7.0}, KlPlace.LOSS
    plan = SimpleNamespace(**{**vars(PLAN), "algorithm": SimpleNamespace(kl_place=place)})
    assert written(VERL | reported, plan=plan)["reference_kl"] == 0.25
    assert math.isnan(written(VERL, plan=plan)["reference_kl"])  # no update was made
    assert "reference_kl" not in written(VERL | reported)


def test_in_fp16_what_losses_are_scaled_by_is_in_the_line() -> None:
    reported = {"actor/grad_scale": 32768.0, "actor/overflow_fraction": 0.5}
    plan = SimpleNamespace(**{**vars(PLAN), "trainer": trainer_plan(dtype=Dtype.FP16)})
    line = written(VERL | reported, plan=plan)
    assert (line["grad_scale"], line["overflow_fraction"]) == (32768.0, 0.5)
    assert math.isnan(written(VERL, plan=plan)["grad_scale"])  # no update was made
    assert "grad_scale" not in written(VERL | reported)


def test_a_metric_that_verl_no_longer_reports_is_an_error() -> None:
    without = {name: value for name, value in VERL.items() if name != "actor/grad_norm"}
    with pytest.raises(TrainingError) as raised:
        written(without)
    assert raised.value.message == "verl did not report actor/grad_norm in step 3"


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ("telemetry", "step 3 ended without log-probabilities to compare"),
        ("correction", "step 3 ended without log-probabilities to compare"),
        ("sync", "step 3 ended without a weight update"),
    ],
)
def test_a_step_without_a_part_of_it_is_an_error(without: str, message: str) -> None:
    with pytest.raises(TrainingError) as raised:
        step_metrics(replace(STEP, **{without: None}), verl=VERL, timing_s=TIMINGS_S, plan=PLAN, number=3)
    assert raised.value.message == message


def test_telemetry_takes_the_seconds_of_both_sides() -> None:
    assert written(VERL)["telemetry_s"] == 0.5 + TAKEN.telemetry_s


def test_validation_needs_exactly_one_mean() -> None:
    assert mean_of({"val-core/arithmetic/reward/mean@1": 0.25, "val-aux/num_turns/mean": 2.0}) == 0.25
    with pytest.raises(TrainingError) as raised:
        mean_of({"val-aux/num_turns/mean": 2.0})
    assert raised.value.message == "expected one validation mean from verl, got 0 in ['val-aux/num_turns/mean']"


def test_a_value_that_is_not_finite_is_written_as_null(tmp_path: Path) -> None:
    append_metrics(tmp_path, {"step": 1, "grad_norm": float("nan"), "reward_mean": 0.5})
    append_metrics(tmp_path, {"step": 2, "grad_norm": float("inf"), "reward_mean": 0.5})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["grad_norm"] for line in lines] == [None, None]


def test_an_error_of_ours_keeps_its_kind_through_ray() -> None:
    error = RuntimeError("remote failed")
    error.cause = NumericsError("a log-probability is not finite")
    assert translate(error) is error.cause


def test_a_failure_that_a_worker_told_is_not_told_over(tmp_path: Path) -> None:
    """vLLM sends only the text of what was raised in its engine process; the worker itself wrote kind and code."""
    append_failure(tmp_path, SyncError("weight update: 1 layers are missing"))
    told = (tmp_path / "events.jsonl").read_text()
    assert report(tmp_path, TrainingError("RuntimeError: Call to collective_rpc method failed: 1 layers are")) == 4
    assert (tmp_path / "events.jsonl").read_text() == told


def test_a_failure_that_nobody_told_is_told(tmp_path: Path) -> None:
    assert report(tmp_path, TrainingError("ValueError: the point", hint="read the log")) == 5
    told = json.loads((tmp_path / "events.jsonl").read_text())
    assert {key: told[key] for key in ("kind", "what", "error", "hint", "exit_code")} == {
        "kind": "failure",
        "what": "ValueError: the point",
        "error": "TrainingError",
        "hint": "read the log",
        "exit_code": 5,
    }


def test_what_the_correction_did_is_in_the_line() -> None:
    line = written(VERL, correction={"is_truncated_fraction": 0.25, "acr_bound_mean": None})
    assert (line["is_truncated_fraction"], line["acr_bound_mean"]) == (0.25, None)


def test_any_other_error_is_a_training_error_with_its_last_line() -> None:
    translated = translate(ValueError("long story\nthe point"))
    assert (type(translated), translated.message) == (TrainingError, "ValueError: the point")
    assert translated.exit_code == 5


def test_backends_get_every_number_by_its_own_name_and_nothing_else() -> None:
    line = {"step": 3, "reward_mean": 0.5, "scheme": "int8", "emulated": False, "a": None, "b": float("nan"), "c": []}
    assert tracked_numbers(line) == {"appliance/step": 3.0, "appliance/reward_mean": 0.5, "appliance/emulated": 0.0}

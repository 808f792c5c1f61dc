"""Trainings by INT8 rollouts with a KV cache in FP8: its scales are measured, sent and proven at every update, and a
run that is resumed samples what the run would have sampled without a break."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from trainings import FEW, HAS_FP8_CACHE, NO_FP8_CACHE, Finished, command, train

from appliance.quant.kv_scales import digest_of, scales_of
from appliance.record.checkpoints import checkpoint_folder
from appliance.trainer.checkpoints import read_state

pytestmark = [
    pytest.mark.e2e(minutes=2),
    pytest.mark.long,
    pytest.mark.skipif(not HAS_FP8_CACHE, reason=NO_FP8_CACHE),
]

STEPS = 3
LAYERS = 4
SETS = (
    "rollout.kv_cache=fp8",
    "trainer.validate_before=false",
    "trainer.validate_every=0",
    "trainer.validate_bf16_every=0",
    "checkpoint.every_steps=1",
    "checkpoint.keep=5",
    "batch.prompts_per_step=8",
    FEW,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, with_tiny_cache: Callable[[Path], Path]) -> Path:
    return with_tiny_cache(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def whole(runs: Path) -> Finished:
    finished = train(runs, *SETS, f"trainer.steps={STEPS}", name="whole")
    assert finished.code == 0, finished.stderr[-4000:]
    return finished


def test_each_update_has_scales_of_its_own_that_every_layer_holds(whole: Finished) -> None:
    engine = json.loads((whole.run_dir / "attest/rollout-0-0.json").read_text())
    assert (engine["scheme"], engine["detail"]["kv_cache"]) == ("int8", "fp8")
    lines = whole.json_lines("sync/kv-scales.jsonl")
    assert [line["sync"] for line in lines] == list(range(1, STEPS + 2))
    assert len({line["digest"] for line in lines}) == STEPS + 1
    assert all(line["layers"] == LAYERS and line["tokens"] > 30 for line in lines)
    ranges = [read_state(checkpoint_folder(whole.run_dir, step=step)).kv_ranges for step in range(1, STEPS + 1)]
    assert all(len(of_step) == LAYERS for of_step in ranges) and ranges[0] != ranges[1] != ranges[2]
    assert all(0.01 < largest < 400 for of_step in ranges for pair in of_step.values() for largest in pair)
    digests = [digest_of(scales_of(of_step), sync=sync) for sync, of_step in enumerate(ranges, start=2)]
    assert digests == [line["digest"] for line in lines[1:]]


def test_the_lines_of_the_steps_say_what_the_scales_did(whole: Finished) -> None:
    lines = whole.json_lines("metrics.jsonl")
    assert [line["scheme"] for line in lines] == ["int8"] * STEPS
    for line in lines:
        assert 0 < line["kv_scales_s"] < line["sync_s"] and 0 < line["kv_range_drift"] < 0.5
        assert 0 < line["mismatch_k3_kl"] < 0.1 and line["grad_norm"] > 0
    assert whole.left == ()


def test_a_resumed_run_continues_with_the_scales_of_its_checkpoint(whole: Finished, runs: Path) -> None:
    """Its first rollouts are those of the run without a break: scales, tokens and rewards."""
    half = train(runs, *SETS, "trainer.steps=2", name="halves")
    assert half.code == 0, half.stderr[-4000:]
    more = command(runs, *SETS, f"trainer.steps={STEPS}", name="halves")
    resumed = subprocess.run([*more, "--resume", "auto"], capture_output=True, text=True, timeout=900, check=False)
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    (first_line, *_), lines = half.json_lines("sync/kv-scales.jsonl"), half.json_lines("metrics.jsonl")
    assert first_line["tokens"] == 0  # nothing was measured
    for step in (2, STEPS):
        ranges = [read_state(checkpoint_folder(run.run_dir, step=step)).kv_ranges for run in (whole, half)]
        assert ranges[0] == ranges[1]
    last = whole.json_lines("metrics.jsonl")[-1]
    assert lines[-1]["step"] == last["step"] == STEPS
    for key in ("reward_mean", "response_tokens_mean", "mismatch_k3_kl", "kv_range_drift"):
        assert lines[-1][key] == last[key]

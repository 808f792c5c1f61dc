"""Trainings by INT4 rollouts: every update is quantised in the engine and proven, and so is the change to BF16 for a
validation. In one flow the trainer's log-probs are the rollouts', bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from trainings import FEW, train

from appliance.quant.int4_gemm import Int4Gemm, WideInt4Gemm, has_int4_kernel

pytestmark = [pytest.mark.e2e(minutes=1), pytest.mark.long]

STEPS = 2
SETS = (
    "rollout.scheme=int4",
    f"trainer.steps={STEPS}",
    "trainer.validate_before=false",
    f"trainer.validate_every={STEPS}",
    f"trainer.validate_bf16_every={STEPS}",
    "guard.k3_kl=1.0",
    "batch.prompts_per_step=8",
    FEW,
)


@pytest.mark.parametrize("forward", ["bf16", "rollout"])
def test_a_training_by_int4_rollouts(forward: str, tmp_path: Path, with_tiny_cache: Callable[[Path], Path]) -> None:
    done = train(with_tiny_cache(tmp_path), *SETS, f"trainer.forward={forward}", name="int4")
    assert done.code == 0, done.stderr[-4000:]
    engine = json.loads((done.run_dir / "attest/rollout-0-0.json").read_text())
    kernel = (Int4Gemm if has_int4_kernel() else WideInt4Gemm).name
    assert (engine["scheme"], engine["emulated"], engine["detail"]["kernels"][kernel]) == ("int4", False, 16)
    taken, sent = (done.json_lines(f"sync/{side}-0-0.jsonl") for side in ("rollout", "trainer"))
    assert [line["manifest"] for line in taken] == [line["manifest"] for line in sent]
    assert [line["scheme"] for line in taken] == [*["int4"] * (STEPS + 1), "bf16", "int4"]
    assert all(line["layers_proven"] == line["layers"] == 17 for line in taken)
    lines = done.json_lines("metrics.jsonl")
    assert [(line["scheme"], line["emulated"]) for line in lines] == [("int4", False)] * STEPS
    k3, errors = ([line[key] for line in lines] for key in ("mismatch_k3_kl", "layer_error_max"))
    print(f"{forward}: k3 {k3}, largest error of a layer {errors}")  # noqa: T201
    assert k3 == [0.0] * STEPS if forward == "rollout" else all(1e-4 < each < 0.5 for each in k3)
    assert all(0.03 < each < 0.2 for each in errors)  # coarser than INT8 by a factor of 16
    assert all(line["grad_norm"] > 0 for line in lines)
    assert lines[-1]["val_reward_bf16_mean"] is not None
    assert done.left == ()

"""A training whose forward is the rollouts': real vLLM, verl and Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from trainings import train

pytestmark = pytest.mark.e2e


def test_no_token_differs_where_bf16_is_two_nats_away(tmp_path: Path) -> None:
    """Coarse rollouts (docs/experiments.md, stress), a temperature that is not 1, two updates a step, no correction."""
    profile = tmp_path / "coarse"
    made = [sys.executable, "-m", "appliance.compare.degraded_profile", "-o", str(profile), "--exponent", "5"]
    subprocess.run(made, check=True, cwd=tmp_path)
    run = train(
        tmp_path,
        "trainer.forward=rollout",
        "trainer.steps=3",
        "trainer.validate_before=false",
        "rollout.temperature=0.8",
        "batch.mini_batch_prompts=16",
        "correction.method=none",
        "correction.cap=null",
        f"quantization.profile={profile}",
        name="flow",
    )
    assert run.code == 0, run.stdout[-3000:]
    lines = run.json_lines("metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert (line["mismatch_k3_kl"], line["mismatch_kl"], line["mismatch_largest_nats"]) == (0, 0, 0)
        assert line["grad_norm"] > 0

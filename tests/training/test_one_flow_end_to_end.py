"""One real training with `trainer.forward: rollout`: its log-probs are the rollouts' in whatever the governor makes of
them, and both sides say so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from trainings import Finished, train

pytestmark = pytest.mark.e2e

# A cap below 1 cuts every weight, and that is the only bound that this run breaks: one level a step, and two steps
# until it holds. The validations in BF16 lead there and back.
CLIMBING = ("correction.cap=0.9", "guard.bad_steps=1", "guard.cooling_steps=0", "guard.actions=[raise-precision, bf16]")
SIZES = ("trainer.steps=6", "task.val_size=32", "trainer.validate_before=false")
VALIDATED = ("trainer.validate_every=2", "trainer.validate_bf16_every=2")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, with_tiny_cache: Callable[[Path], Path]) -> Finished:
    root = with_tiny_cache(tmp_path_factory.mktemp("runs"))
    finished = train(root, "trainer.forward=rollout", *CLIMBING, *SIZES, *VALIDATED, name="one-flow")
    assert finished.code == 0, finished.stderr[-4000:]
    return finished


def test_every_log_prob_is_the_rollouts_through_each_change_of_precision(run: Finished) -> None:
    """In BF16 at the sizes of this model."""
    lines = run.json_lines("metrics.jsonl")
    assert [(line["scheme"], line["bf16_layers"]) for line in lines] == [
        *[("int8", 0)] * 2,
        ("int8", 4),
        ("int8", 8),
        *[("bf16", 16)] * 2,
    ]
    assert [(line["mismatch_equal_fraction"], line["mismatch_k3_kl"]) for line in lines] == [(1.0, 0.0)] * 6
    updates = [(line["scheme"], line["bf16_layers"]) for line in run.json_lines("sync/rollout-0-0.jsonl")]
    assert updates[2:6] == [("int8", 4), ("bf16", 16), ("int8", 4), ("int8", 8)]


def test_trainer_and_engine_attest_their_layers(run: Finished) -> None:
    """The engine anew with each change, the trainer as it began."""
    said = [json.loads((run.run_dir / "attest" / name).read_text()) for name in ("trainer-0.json", "rollout-0-0.json")]
    trainer, engine = (each["detail"] for each in said)
    assert trainer["forward"] == "rollout"
    assert (len(trainer["quantised"]), engine["quantised"]) == (16, [])
    assert "in int8, as it was trained: FLASHRL_CONFIG=" in " ".join(run.stderr.split())
    assert run.left == ()


def test_no_token_differs_where_bf16_is_two_nats_away(tmp_path: Path, with_tiny_cache: Callable[[Path], Path]) -> None:
    """Coarse rollouts (docs/experiments.md, stress), a temperature that is not 1, two updates a step, no correction."""
    root, profile = with_tiny_cache(tmp_path / "runs"), tmp_path / "coarse"
    made = [sys.executable, "-m", "appliance.compare.degraded_profile", "-o", str(profile), "--exponent", "5"]
    subprocess.run(made, check=True, cwd=tmp_path)
    finished = train(
        root,
        "trainer.forward=rollout",
        "trainer.steps=3",
        "trainer.validate_before=false",
        "task.val_size=32",
        "rollout.temperature=0.8",
        "batch.mini_batch_prompts=16",
        "correction.method=none",
        "correction.cap=null",
        f"quantization.profile={profile}",
        name="coarse",
    )
    assert finished.code == 0, finished.stderr[-4000:]
    lines = finished.json_lines("metrics.jsonl")
    assert [(line["step"], line["mismatch_equal_fraction"]) for line in lines] == [(1, 1.0), (2, 1.0), (3, 1.0)]
    for line in lines:
        assert (line["mismatch_k3_kl"], line["mismatch_kl"], line["mismatch_largest_nats"]) == (0, 0, 0)
        assert line["grad_norm"] > 0

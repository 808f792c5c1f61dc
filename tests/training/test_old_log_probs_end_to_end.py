"""Two real trainings, with a pass for the old log-probs and with those of the update: the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from trainings import FEW, Finished, train

pytestmark = [pytest.mark.e2e(minutes=3), pytest.mark.long]

# What a clock says. The entropy is a mean in float64 in one, and in float32 in the other.
DIFFERS = ("_s", "_per_s")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, with_tiny_cache: Callable[[Path], Path]) -> dict[str, Finished]:
    root = with_tiny_cache(tmp_path_factory.mktemp("runs"))
    sets = ("trainer.steps=2", "trainer.validate_before=false", "rollout.temperature=0.8", "batch.prompts_per_step=16")
    trainings = {
        source: train(root, *sets, FEW, f"trainer.old_log_probs={source}", name=source)
        for source in ("auto", "recompute")
    }
    for finished in trainings.values():
        assert finished.code == 0, finished.stderr[-4000:]
    return trainings


def test_the_second_step_is_the_same_to_the_last_bit(runs: dict[str, Finished]) -> None:
    """So is what the first one made of the weights."""
    for pass_line, other in zip(*(run.json_lines("metrics.jsonl") for run in runs.values()), strict=True):
        entropies = pass_line.pop("entropy"), other.pop("entropy")
        assert entropies[0] == pytest.approx(entropies[1], rel=1e-5)
        for line in (pass_line, other):
            assert line["mismatch_k3_kl"] > 0 and line["grad_norm"] > 0
        kept = {key for key in pass_line.keys() | other.keys() if not key.endswith(DIFFERS)}
        assert {key: pass_line.get(key) for key in kept} == {key: other.get(key) for key in kept}


def test_there_is_no_pass(runs: dict[str, Finished]) -> None:
    seconds = {name: [line["logprob_s"] for line in run.json_lines("metrics.jsonl")] for name, run in runs.items()}
    assert set(seconds["auto"]) == {0.0} and min(seconds["recompute"]) > 0
    phases = {
        name: {event["what"] for event in run.json_lines("events.jsonl") if event["kind"] == "phase"}
        for name, run in runs.items()
    }
    assert phases["recompute"] - phases["auto"] == {"log-probs"}

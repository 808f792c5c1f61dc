"""Predictions of profiles beside what runs measured: which runs count, and how much the factors vary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.predictor import Comparison, compare, page

HEADER = {
    "schema_version": 2,
    **dict.fromkeys(("model", "revision", "model_hash", "data_hash", "donor"), ""),
    "kind": "calibrated",
    "versions": {},
    "scheme": "int8",
    "settings": {"response_tokens": 16},
    "smoothing": [],
    "layers": [],
    "suggested_ignore": [],
    "memory": None,
}
PREDICTED = {"tokens": 600, "kl": 0.01, "k3_kl": 0.02, "kl_tokens": 0.0, "probs_diff_mean": 0.0, "weight_max": 1.0}


def run_of(
    folder: Path, *k3: float | None, scheme: str = "int8", predicted: dict[str, float] | None = PREDICTED
) -> Path:
    (folder / "profile").mkdir(parents=True)
    weights = {"name_or_path": "/models/m-0123456789ab"}
    plan = {"rollout": {"scheme": scheme}, "model": {"builtin": None}, "weights": weights}
    (folder / "plan.json").write_text(json.dumps(plan))
    lines = [json.dumps({"step": number, "mismatch_k3_kl": value}) for number, value in enumerate(k3)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if predicted is not None:
        header = json.dumps({"__metadata__": {"appliance": json.dumps({**HEADER, "predicted": predicted})}}).encode()
        file = folder / "profile" / "profile.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def test_the_first_three_steps_with_a_mismatch_count(tmp_path: Path) -> None:
    comparison = compare(run_of(tmp_path / "a-1", None, 0.03, 0.01, 0.02, 9.0))
    assert comparison is not None and comparison.predicted is not None
    assert (comparison.name, comparison.model, comparison.measured) == ("a-1", "m", 0.02)
    assert comparison.predicted.kl == 0.01


def test_a_run_with_bf16_rollouts_needs_no_prediction_and_others_do(tmp_path: Path) -> None:
    bf16 = compare(run_of(tmp_path / "a", 0.002, scheme="bf16", predicted=None))
    assert bf16 == Comparison("a", "m", 0.002, None)
    assert compare(run_of(tmp_path / "b", 0.02, predicted=None)) is None
    assert compare(run_of(tmp_path / "one-flow", 0.0, 0.0)) is None
    assert compare(run_of(tmp_path / "c", None, None)) is None


def test_the_factors_of_each_predictor_and_how_much_they_vary(tmp_path: Path) -> None:
    """Measured 0.01 and 0.04, predicted KL 0.01 twice: factors 1 and 4, so their mean is 2, and one standard deviation
    of their logarithms is log(4) / sqrt(2), a factor of 2.67."""
    comparisons = [compare(run_of(tmp_path / name, k3)) for name, k3 in (("a", 0.01), ("b", 0.04))]
    lines = page([comparison for comparison in comparisons if comparison])
    assert "| b | m | 600 | 0.01 | 0.02 | 0.04 | 4.00 | 2.00 |" in lines
    assert lines[-1] == "| all models | 2 | 2.00 | 2.67 | 1.00 | 2.67 |"


def test_what_is_no_run_is_not_passed_over(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"plan\.json"):
        compare(tmp_path)

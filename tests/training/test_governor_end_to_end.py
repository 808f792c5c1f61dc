"""One real training that climbs the whole ladder: every change is in the metrics, proven, and said by the engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from trainings import FEW, Finished, train

pytestmark = [pytest.mark.e2e(minutes=2), pytest.mark.long]

STEPS = 7
# A bound that every step breaks, and no pause: one level a step. What is decided in step n is sent at the end of step
# n + 1, so it holds for the rollouts of step n + 2.
CLIMBING = ("guard.k3_kl=1e-12", "guard.bad_steps=1", "guard.cooling_steps=0")
ACR = ("correction.method=acr", "correction.cap=1.005")  # near 1: INT8 moves the weights of this model by a hundredth
ACTIONS = "guard.actions=[warn, tighten, raise-precision, bf16]"
LAYERS = 16  # 4 decoder layers of 4 quantised ones
QUARTER = "raise-precision (int8, 25% of layers in bf16)"
HALF = "raise-precision (int8, 50% of layers in bf16)"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, with_tiny_cache: Callable[[Path], Path]) -> Finished:
    root = with_tiny_cache(tmp_path_factory.mktemp("runs"))
    sizes = (FEW, f"trainer.steps={STEPS}", "trainer.validate_before=false", "trainer.validate_every=3")
    finished = train(root, *CLIMBING, *ACR, ACTIONS, *sizes, "trainer.validate_bf16_every=3", name="climbs")
    assert finished.code == 0, finished.stderr[-4000:]
    return finished


def test_rollouts_become_what_was_decided_two_steps_before(run: Finished) -> None:
    lines = run.json_lines("metrics.jsonl")
    assert [(line["scheme"], line["bf16_layers"]) for line in lines] == [
        *[("int8", 0)] * 4,
        ("int8", LAYERS // 4),
        ("int8", LAYERS // 2),
        ("bf16", LAYERS),
    ]
    assert [line["guard_level"] for line in lines] == ["observe", "warn", "tighten", QUARTER, HALF, "bf16", "bf16"]
    guard_events = [event for event in run.json_lines("events.jsonl") if event["kind"] == "guard"]
    assert [(event["step"], event["action"]) for event in guard_events] == [
        (1, "warn"),
        (2, "tighten"),
        (3, "raise-precision"),
        (4, "raise-precision"),
        (5, "bf16"),
    ]
    assert [event["numbers"][0]["value"] for event in guard_events] == [line["mismatch_k3_kl"] for line in lines[:5]]
    assert [line["layer_error_max"] is None for line in lines] == [False] * 5 + [True] * 2  # of the sync after the step


def test_the_tightened_correction_holds_from_the_next_step_on(run: Finished) -> None:
    """The driver checks each batch against it; a run that ends well has passed that check in every step."""
    lines = run.json_lines("metrics.jsonl")
    assert [line["correction_cap"] for line in lines] == pytest.approx([1.005, 1.005, *[1.0025] * 5])
    assert [line["correction_reject_k3"] for line in lines] == [None, None, *[0.01] * 5]


def test_truncated_tokens_are_clipped_later(run: Finished) -> None:
    """With verl's loop around the loss, before and after the cap was tightened."""
    lines = run.json_lines("metrics.jsonl")
    assert all(0 < line["acr_widened_fraction"] <= line["is_truncated_fraction"] < 1 for line in lines)
    assert all(line["acr_bound_mean"] > 1.2 for line in lines)


def test_every_change_is_acknowledged_with_all_layers_proven(run: Finished) -> None:
    """Updates 1 to 4 are those before training and of steps 1 to 3; 5 and 6 are for the validation in BF16."""
    taken = run.json_lines("sync/rollout-0-0.jsonl")
    assert [(line["scheme"], line["bf16_layers"], line["switched"]) for line in taken] == [
        *[("int8", 0, 0)] * 4,
        ("bf16", LAYERS, LAYERS),
        ("int8", 0, LAYERS),
        ("int8", LAYERS // 4, LAYERS // 4),
        ("int8", LAYERS // 2, LAYERS // 4),
        ("bf16", LAYERS, LAYERS // 2),
        ("bf16", LAYERS, 0),
    ]
    assert all(line["layers_proven"] == line["layers"] == LAYERS + 1 for line in taken)
    assert [line["manifest"] for line in run.json_lines("sync/trainer-0-0.jsonl")] == [
        line["manifest"] for line in taken
    ]
    assert json.loads((run.run_dir / "attest" / "rollout-0-0.json").read_text())["scheme"] == "bf16"


def test_the_worst_layers_of_the_profile_go_first(run: Finished) -> None:
    from appliance.quant.files import read_file_header

    notes = [event for event in run.json_lines("events.jsonl") if event["kind"] == "note" and "bf16_layers" in event]
    assert [event["what"] for event in notes] == [
        "rollouts from now on: int8 with 4 layers in bf16",
        "rollouts from now on: int8 with 8 layers in bf16",
        "rollouts from now on: bf16",
    ]
    layers = read_file_header(Path(run.run_dir) / "profile")["layers"]
    worst = sorted(layers, key=lambda each: -each["output_error"])[: LAYERS // 4]
    assert notes[0]["bf16_layers"] == sorted(name for each in worst for name in each["layer"])


def test_both_validations_are_made_and_shown(run: Finished) -> None:
    """In step 3 two of them; in step 6 and 7 the rollouts are in BF16 anyway, or the switch is for both."""
    validated = [line for line in run.json_lines("metrics.jsonl") if "val_reward_mean" in line]
    assert [line["step"] for line in validated] == [3, 6, 7]
    assert all(line["val_samples"] == 64 and line["val_reward_bf16_mean"] is not None for line in validated)
    assert abs(validated[0]["val_reward_bf16_mean"] - validated[0]["val_reward_mean"]) < 0.1
    assert all(line["val_reward_bf16_mean"] == line["val_reward_mean"] for line in validated[1:])
    schemes = [(line["scheme"], line["val_scheme"]) for line in validated]
    assert schemes == [("int8", "int8"), ("int8", "bf16"), ("bf16", "bf16")]  # BF16 comes with the update of step 6
    samples = [line for line in run.json_lines("samples.jsonl") if line["validation"]]
    assert [(line["scheme"], line["val_scheme"]) for line in samples] == schemes
    shown = next(line for line in run.stderr.splitlines() if line.startswith("step 3/"))
    assert f"(bf16 {validated[0]['val_reward_bf16_mean']:.3f})" in shown
    assert run.left == ()

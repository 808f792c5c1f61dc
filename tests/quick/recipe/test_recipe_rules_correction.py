"""Corrections that cannot be are refused with their place, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.corrections.registry import METHODS
from appliance.errors import RecipeError
from appliance.recipe.load import load_recipe

RECIPE = "extends: arithmetic-tiny-int8\n"
UAQ_HINT = "give one such as 1.5, or null"


def problems_of(path: Path, text: str, *sets: str) -> list[tuple[str, str]]:
    path.write_text(RECIPE + text)
    with pytest.raises(RecipeError) as raised:
        load_recipe(str(path), sets=sets)
    return raised.value.problems


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("cap: 0", ("correction.cap: must be greater than 0, got `0`", "")),
        ("cap: -2", ("correction.cap: must be greater than 0, got `-2`", "")),
        ("cap: .inf", ("correction.cap: not a finite number: `.inf`", "")),
        ("uaq_scale: 1", ("correction.uaq_scale: 1 scales nothing", UAQ_HINT)),
        ("uaq_scale: 0", ("correction.uaq_scale: must be greater than 0, got `0`", "")),
        (
            "uaq_scale: 1e9",
            ("correction.uaq_scale: 1e+09 does not lie between 0.000244141 and 4096", UAQ_HINT),
        ),
    ],
)
def test_a_correction_that_cannot_be(tmp_path: Path, line: str, problem: tuple[str, str]) -> None:
    path = tmp_path / "r.yaml"
    place = f"{path}:{3}: "
    assert problems_of(path, f"correction:\n  {line}\n") == [(place + problem[0], problem[1])]


CALIBRATED = "correction:\n  method: calibrated-clipping\n  "


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            "shadow_fraction: 0",
            (
                "correction.shadow_fraction: `calibrated-clipping` without a shadow batch: 0 of 256 sequences is none "
                "for each of 1 rank",
                "raise it",
            ),
        ),
        ("shadow_fraction: 1.5", ("correction.shadow_fraction: must be at most 1, got `1.5`", "")),
        ("shadow_every: 0", ("correction.shadow_every: must be at least 1, got `0`", "")),
        (
            "cap: 1.1",
            (
                "correction.cap: 1/1.1..1.1 leaves out a part of the clip range 0.8..1.2, which can only be widened",
                "give at least 1.25",
            ),
        ),
    ],
)
def test_calibrated_clipping_that_cannot_be(tmp_path: Path, line: str, problem: tuple[str, str]) -> None:
    path = tmp_path / "r.yaml"
    assert problems_of(path, f"{CALIBRATED}{line}\n") == [(f"{path}:4: {problem[0]}", problem[1])]


def test_calibrated_clipping_needs_a_sequence_of_the_shadow_batch_on_each_rank(tmp_path: Path) -> None:
    problem = problems_of(
        tmp_path / "r.yaml", f"{CALIBRATED}shadow_fraction: 0.02\n", "cluster.device=h100", "cluster.gpus_per_node=8"
    )[0]
    assert problem[0].endswith("without a shadow batch: 0.02 of 256 sequences is none for each of 8 ranks")


@pytest.mark.parametrize("key", ["shadow_fraction: 0.5", "shadow_every: 7"])
def test_a_shadow_pass_is_of_calibrated_clipping_alone(tmp_path: Path, key: str) -> None:
    path, name = tmp_path / "r.yaml", key.partition(":")[0]
    message = f"{path}:3: correction.{name}: `tis` has no shadow pass"
    assert problems_of(path, f"correction:\n  {key}\n") == [(message, "remove it, or use `calibrated-clipping`")]


TBPO = ("algorithm.loss=tbpo", "correction.cap=null")
FITTING = "`none`, `tis-sequence`, `tis-geometric`, `sequence-mask`, `geometric-mask`, `k3-reject`"


@pytest.mark.parametrize("method", METHODS)
def test_what_acts_on_single_tokens_does_not_go_with_a_loss_of_responses(tmp_path: Path, method: str) -> None:
    sets, does = (*TBPO, f"correction.method={method}"), {"acr": "clips", "calibrated-clipping": "clips"}
    if f"`{method}`" in FITTING:
        assert load_recipe("arithmetic-tiny-int8", sets=sets).correction.method == method
        return
    message = (
        f"`{method}` {does.get(method, 'weights')} a response token by token, and `tbpo` has one ratio for all of them"
    )
    if METHODS[method].centers:
        message = f"`{method}` centers the score of each token, and `tbpo` has one ratio for a whole response"
    hint = f"use `tis-geometric` as its source does, or another one of {FITTING}"
    (problem,) = problems_of(tmp_path / "r.yaml", "", *sets)
    assert problem == (f"--set correction.method={method}: correction.method: {message}", hint)


@pytest.mark.parametrize(
    ("line", "usual"), [("clip_low: 0.2", "0.0003"), ("clip_high: 0.11", "0.0004"), ("dual_clip: 3", "1.0007")]
)
def test_bounds_of_a_token_do_not_go_with_a_loss_of_responses(tmp_path: Path, line: str, usual: str) -> None:
    path, (key, _, bound) = tmp_path / "r.yaml", line.partition(": ")
    text = f"correction: {{method: tis-geometric}}\nalgorithm:\n  loss: tbpo\n  {line}\n"
    message = f"`tbpo` bounds the mean ratio of a response, and {bound} is a bound for a token's"
    (problem,) = problems_of(path, text)
    assert problem == (f"{path}:5: algorithm.{key}: {message}", f"give one such as {usual}, or null")
    narrow = {"clip_low": "0.1", "clip_high": "0.1", "dual_clip": "1.05"}[key]
    path.write_text(path.read_text().replace(bound, narrow))
    assert load_recipe(str(path)).algorithm.bounds[key] == float(narrow)


def test_a_cap_that_is_no_number_has_its_place(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path / "r.yaml", "", "correction.cap=abc")
    assert problem == ("--set correction.cap=abc: correction.cap: expected a number, got the text `abc`", "")


CENTERED = "correction:\n  method: score-centering-tis\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "rollout: {top_log_probs: 0}\n",
            (
                "2: rollout.top_log_probs: `score-centering-tis` needs log-probs of the engine's most likely words",
                "give a number such as 20, or null",
            ),
        ),
        (
            "trainer: {forward: rollout}\n",
            (
                "4: correction.method: `score-centering-tis` has nothing to take out where the trainer computes what "
                "the rollouts do",
                "use `tis`, or trainer.forward: bf16",
            ),
        ),
        (
            "trainer: {sequence_parallel: 2}\ncluster: {device: h100, gpus_per_node: 2}\n",
            (
                "2: trainer.sequence_parallel: log-probs of the engine's most likely words are not computed where "
                "GPUs share a sequence",
                "use 1, or rollout.top_log_probs: 0 and a correction.method that needs none",
            ),
        ),
    ],
)
def test_what_score_centering_does_not_go_with_has_its_line(
    tmp_path: Path, text: str, problem: tuple[str, str]
) -> None:
    path = tmp_path / "r.yaml"
    assert problems_of(path, text + CENTERED) == [(f"{path}:{problem[0]}", problem[1])]

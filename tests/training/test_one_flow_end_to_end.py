"""Real trainings with `trainer.forward: rollout`: their log-probs are the rollouts' in whatever the governor makes of
them, both sides say so, and a pass for them can be left out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from trainings import FEW, Finished, train

from appliance.terms.environment import EXACT_VARIABLE
from appliance.terms.schemes import Scheme
from flashrl_compat.config_file import read_config

pytestmark = [pytest.mark.e2e(minutes=3), pytest.mark.long]

# A cap below 1 cuts every weight, and that is the only bound that these runs break: one level a step, and two steps
# until it holds. The validations in BF16 lead there and back.
CLIMBING = ("correction.cap=0.9", "guard.bad_steps=1", "guard.cooling_steps=0", "guard.actions=[raise-precision, bf16]")
VALIDATED = ("trainer.validate_before=false", "trainer.validate_every=2", "trainer.validate_bf16_every=2")
UPDATES = ("batch.prompts_per_step=16", "batch.mini_batch_prompts=8")  # two a step
STEPS = 6
SAMPLES = 8  # of a prompt, by the recipe


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, with_tiny_cache: Callable[[Path], Path]) -> list[Finished]:
    """With a pass for the old log-probs, and without: coarse rollouts (docs/experiments.md, stress), where BF16 is two
    nats away, and a temperature that is not 1."""
    root = with_tiny_cache(tmp_path_factory.mktemp("runs"))
    profile = root / "profile"
    profile_argv = [sys.executable, "-m", "benchmarks.degraded_profile", "-o", str(profile), "--exponent", "5"]
    subprocess.run(profile_argv, check=True, cwd=root)
    sets = (
        "trainer.forward=rollout",
        f"trainer.steps={STEPS}",
        "rollout.temperature=0.8",
        f"quantization.profile={profile}",
    )
    reuses = ("trainer.old_log_probs=rollout",)
    trainings = [
        train(root, *sets, FEW, *CLIMBING, *VALIDATED, *UPDATES, *more, name=name)
        for name, more in (("passes", ()), ("reuses", reuses))
    ]
    for finished in trainings:
        assert finished.code == 0, finished.stderr[-4000:]
    return trainings


@pytest.mark.parametrize("which", [0, 1])
def test_every_log_prob_is_the_rollouts_through_each_change_of_precision(runs: list[Finished], which: int) -> None:
    """No token differs, coarse or in BF16 at the sizes of this model."""
    lines = runs[which].json_lines("metrics.jsonl")
    assert [(line["scheme"], line["bf16_layers"]) for line in lines] == [
        *[("int8", 0)] * 2,
        ("int8", 4),
        ("int8", 8),
        *[("bf16", 16)] * 2,
    ]
    for line in lines:
        assert (line["mismatch_equal_fraction"], line["mismatch_k3_kl"], line["mismatch_kl"]) == (1, 0, 0)
        assert line["mismatch_largest_nats"] == 0 and line["grad_norm"] > 0
    updates = [(line["scheme"], line["bf16_layers"]) for line in runs[which].json_lines("sync/rollout-0-0.jsonl")]
    assert updates[2:6] == [("int8", 4), ("bf16", 16), ("int8", 4), ("int8", 8)]


@pytest.mark.parametrize("which", [0, 1])
def test_trainer_and_engine_attest_their_layers(runs: list[Finished], which: int) -> None:
    """Anew with each change: the last one was to BF16."""
    run = runs[which]
    said = [json.loads((run.run_dir / "attest" / name).read_text()) for name in ("trainer-0.json", "rollout-0-0.json")]
    trainer, engine = (each["detail"] for each in said)
    assert trainer["forward"] == "rollout"
    assert trainer["quantised"] == engine["quantised"] == []
    assert f"as it was trained: {EXACT_VARIABLE}=1 FLASHRL_CONFIG=" in " ".join(run.stderr.split())
    (served,) = read_config(run.run_dir / "model" / "profile" / "quantization.yaml")
    assert served.quantisation.scheme is Scheme.BF16  # the guard's last word
    assert run.left == ()


def test_without_a_pass_for_log_probs_it_is_the_same_run_bit_for_bit(runs: list[Finished]) -> None:
    """But for times, and for what is said of the tokens that are held: then the first update's."""
    passes, reuses = (each.json_lines("metrics.jsonl") for each in runs)
    of_held = ("entropy", "mismatch_by_length")
    for with_pass, other in zip(passes, reuses, strict=True):
        assert set(with_pass) == set(other)
        timed = {key for key in with_pass if key.endswith("_s")}
        assert {key for key in with_pass if with_pass[key] != other[key]} <= {*timed, *of_held}
        held, whole = (sum(each["num_sequences"] for each in line["mismatch_by_length"]) for line in (other, with_pass))
        assert (held, whole) == (8 * SAMPLES, 16 * SAMPLES)
        assert 0 < other["entropy"] != with_pass["entropy"]
        assert with_pass["logprob_s"] > other["logprob_s"] == 0
    models = [sorted((each.run_dir / "model").glob("*.safetensors")) for each in runs]
    assert [each.name for each in models[0]] == [each.name for each in models[1]] != []
    for with_pass, other in zip(*models, strict=True):
        assert with_pass.read_bytes() == other.read_bytes()
    phases = [{each["what"] for each in run.json_lines("events.jsonl") if each["kind"] == "phase"} for run in runs]
    assert phases[0] - phases[1] == {"log-probs"}

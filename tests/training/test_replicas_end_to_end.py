"""One real training whose two engines differ: FP8 per channel, emulated and with a profile, beside BF16. The trainer's
two ranks share each sequence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from trainings import FEW, Finished, train

from appliance.quant.files import read_file_header
from appliance.record.plan import read_plan
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation
from flashrl_compat.config_file import read_config

pytestmark = [pytest.mark.e2e, pytest.mark.long]

STEPS = 2
ICEPOP = ("correction.method=icepop", "correction.cap=null", "correction.bounds=[0.99, 1.01]")
ENGINES = ("rollout.scheme=auto", "rollout.replicas=[fp8-channel, bf16]", "quantization.emulate=true")
SIZES = (
    "cluster.gpus_per_node=2",
    "trainer.sequence_parallel=2",
    f"trainer.steps={STEPS}",
    "trainer.validate_before=false",
    "trainer.validate_every=0",
    "trainer.validate_bf16_every=0",
    FEW,
    "batch.prompts_per_step=8",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, with_tiny_cache: Callable[[Path], Path]) -> Finished:
    root = with_tiny_cache(tmp_path_factory.mktemp("runs"))
    finished = train(root, *ENGINES, *ICEPOP, *SIZES, name="two", timeout_s=600)
    assert finished.code == 0, finished.stderr[-4000:]
    return finished


def test_each_engine_attests_a_scheme_of_its_own(run: Finished) -> None:
    said = {path.stem: json.loads(path.read_text()) for path in (run.run_dir / "attest").iterdir()}
    assert sorted(said) == ["driver-0", "rollout-0-0", "rollout-1-0", "trainer-0", "trainer-1"]
    first, second = said["rollout-0-0"], said["rollout-1-0"]
    assert (first["scheme"], first["emulated"], first["rank"]) == ("fp8-channel", True, 0)
    assert (second["scheme"], second["emulated"], second["rank"]) == ("bf16", False, 1)
    assert first["detail"]["kernels"] != second["detail"]["kernels"]


def test_each_engine_acknowledges_every_update_in_its_scheme(run: Finished) -> None:
    first, second = (run.json_lines(f"sync/rollout-{replica}-0.jsonl") for replica in (0, 1))
    assert [line["sync"] for line in first] == [line["sync"] for line in second] == list(range(1, STEPS + 2))
    assert [line["manifest"] for line in first] == [line["manifest"] for line in second]
    assert {(line["scheme"], line["emulated"]) for line in first} == {("fp8-channel", True)}
    assert {(line["scheme"], line["emulated"]) for line in second} == {("bf16", False)}
    assert all(line["layers_proven"] == line["layers"] == 17 and line["telemetry"] for line in first)
    assert all(line["layers_proven"] and line["telemetry"] is None for line in second)


def test_the_ranks_share_each_sequence(run: Finished) -> None:
    """What they compute together is what the engines computed: `mismatch_k3_kl` below."""
    overrides = read_plan(run.run_dir / "plan.json").argv
    assert "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2" in overrides


def test_metrics_say_both_schemes_and_that_one_is_emulated(run: Finished) -> None:
    lines = run.json_lines("metrics.jsonl")
    assert [(line["step"], line["scheme"], line["emulated"]) for line in lines] == [
        (step, "fp8-channel+bf16", True) for step in range(1, STEPS + 1)
    ]
    assert all(0 < line["mismatch_k3_kl"] < 0.015 and line["layer_error_max"] > 0 for line in lines)
    assert all(0 < line["is_truncated_fraction"] < 1 for line in lines)  # icepop's, on both ranks


def test_the_profile_is_of_the_scheme_that_has_one_and_its_engine_was_told(run: Finished) -> None:
    folder = run.run_dir / "profile"
    header = read_file_header(folder)
    assert (header["kind"], header["scheme"]) == ("calibrated", "fp8-channel")
    assert len(header["layers"]) == 4 * 4
    planned = read_plan(run.run_dir / "plan.json").engines
    assert planned == (
        Quantisation(scheme=Scheme.FP8_CHANNEL, emulated=True, profile=str(folder)),
        Quantisation(scheme=Scheme.BF16),
    )
    kept_layers = tuple(header["suggested_ignore"])
    first, second = (entry.quantisation for entry in read_config(folder / "quantization.yaml"))
    assert (first.scheme, first.emulated, first.profile, first.ignore) == (
        Scheme.FP8_CHANNEL,
        True,
        str(folder),
        kept_layers,
    )
    assert second == planned[1]
    assert run.left == ()

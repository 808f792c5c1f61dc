"""TRL's GRPOTrainer as it is released, on a CPU, with vLLM in its process: the example. `make test-trl` brings TRL."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from vllm_server import starting

from appliance.tasks.library import TINY_MODELS
from appliance.tasks.tiny_model import make_tiny_model

if importlib.util.find_spec("trl") is None:
    pytest.skip("TRL is not installed: make test-trl", allow_module_level=True)

pytestmark = pytest.mark.e2e(minutes=4)

STEPS = 20
LAYERS = 17  # of the tiny model that hold a weight of their own: four in each of four layers, and the head
PROVEN = rf"took weight update (\d+) by load_weights: 50 tensors in [\d.]+ s, {LAYERS} of {LAYERS} layers proven"
ASYNC_STEPS = 4
SERVE = (
    *("--enforce-eager", "--max-model-len", "64", "--kv-cache-memory-bytes", str(256 << 20)),
    *("--weight-transfer-config", '{"backend": "shm"}'),
)
ASYNC_STEP = re.compile(
    r"step (\d+): reward ([\d.]+), ratio ([\d.]+), KL ([\d.]+), ([\d.]+) updates old, at most (\d+); "
    r"(\d+) proven, the last with (\d+) in flight"
)
STEP = re.compile(
    r"step (\d+): reward [\d.]+; TRL: ratio ([\d.]+) \(([\d.]+) to ([\d.]+)\); "
    r"ours: weight ([\d.]+), k3 ([\d.e-]+), ESS ([\d.]+); (\d+) updates proven"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, kept_models: Path) -> Path:
    """That of `make test`; else where the first run of the script makes it."""
    folder = tmp_path_factory.mktemp("trl") / "tiny-arithmetic"
    for kept in kept_models.glob("tiny-arithmetic-*"):
        shutil.copytree(kept, folder)
    return folder


@pytest.fixture
def tiny_model(model: Path) -> Path:
    """The same, also when this test runs alone."""
    if not (model / "config.json").is_file():
        make_tiny_model(TINY_MODELS["tiny-arithmetic"], difficulty=2, folder=model, on_step=lambda *_: None)
    return model


def run(program: Path, *arguments: object, scheme: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(program), *map(str, arguments)]
    root = Path(__file__).parents[2]
    found = os.pathsep.join([os.environ["PYTHONPATH"], *map(str, (root / "examples/trl", root / "tests/engine"))])
    settings = {**os.environ, "FLASHRL_CONFIG": scheme, "VLLM_LOGGING_LEVEL": "WARNING", "PYTHONPATH": found}
    return subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, timeout=1200)


@contextlib.contextmanager
def served(model: Path, *, folder: Path) -> Iterator[str]:
    """The URL of `vllm serve` in INT8, which may still be starting."""
    more = {
        "FLASHRL_CONFIG": "int8",
        "FLASHRL_LOGGING_FILE": str(folder / "flashrl.log"),
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    with starting(model, options=SERVE, output=folder / "server.txt", environ=more) as (_, port):
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("scheme", ["int8", "bf16"])
def test_the_example_trains_and_every_update_is_proven(scheme: str, root: Path, model: Path, tmp_path: Path) -> None:
    arguments = ("--model", model, "--steps", STEPS)
    done = run(root / "examples/trl/train.py", *arguments, scheme=scheme, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]

    before = float(re.search(r"^before: ([\d.]+) of 512 unseen problems$", done.stdout, re.M)[1])
    after, proven = re.search(r"^after: ([\d.]+), (\d+) updates proven$", done.stdout, re.M).groups()
    assert before < 0.1
    assert float(after) >= 0.9
    assert int(proven) == STEPS + 1  # one before each step, one before the last look
    lines = re.findall(
        rf"took weight update (\d+) by load_weights: 50 tensors in [\d.]+ s, {LAYERS} of {LAYERS} layers proven",
        done.stderr,
    )
    assert lines == [str(number) for number in range(1, STEPS + 2)]
    assert f"has the scheme {scheme};" in done.stderr

    steps = STEP.findall(done.stdout)
    assert [(int(step), int(count)) for step, *_, count in steps] == [(step, step) for step in range(1, STEPS + 1)]
    for _, *numbers, _ in steps:
        mean, low, high, weight, k3, ess = map(float, numbers)
        assert 0.95 < mean < 1.05  # TRL's: trainer's probability over rollout's
        assert 0 < low <= 1 <= high < 2  # the script's cap, which leaves such ratios as they are
        assert weight == pytest.approx(mean, abs=1.5e-5)  # two roundings to 5 digits, and float32
        assert_mismatch_is_of(mean, low=low - 5e-4, high=high + 5e-4, k3=k3, ess=ess)


def assert_mismatch_is_of(mean: float, *, low: float, high: float, k3: float, ess: float) -> None:
    """What follows for k3 and ESS where weights w are within low..high, and so is 1.

    E (w - 1)^2 = mean^2 (1 / ESS - 1) + (mean - 1)^2.  w - 1 - ln w = (w - 1)^2 / (2 u^2) with u between 1 and w, by
    Taylor's formula, so k3 is between E (w - 1)^2 / (2 high^2) and E (w - 1)^2 / (2 low^2).  The variance of w is at
    most (high - mean) (mean - low), by Bhatia and Davis.  ESS is printed to 5e-7, the mean to 5e-6, which for means
    within 0.95..1.05 adds less than 2e-6 to E (w - 1)^2, and k3 to 0.5 %.
    """
    spread = mean**2 * (1 / ess - 1)
    square = spread + (mean - 1) ** 2
    assert (square - 2e-6) / (2 * high**2) / 1.005 <= k3 <= (square + 2e-6) / (2 * low**2) * 1.005
    assert 0 <= spread <= (high - mean) * (mean - low) + 2e-6


@pytest.mark.parametrize("setting", [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.1}])
def test_sampling_among_some_of_the_words_is_refused(
    setting: dict[str, float], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(root / "examples/trl")
    monkeypatch.setattr(os, "environ", dict(os.environ))  # the script sets vLLM's variables for its process
    import train
    from trl import GRPOConfig

    with pytest.raises(ValueError, match=r"^top_p, top_k, min_p: vLLM's log-probs would be among the words"):
        train.MeasuredGRPOTrainer(model="", reward_funcs=[], args=GRPOConfig(use_cpu=True, bf16=False, **setting))


@pytest.mark.parametrize("scheme", ["int8", "bf16"])
def test_a_flipped_bit_is_named_and_the_engine_does_not_generate(
    scheme: str, root: Path, model: Path, tmp_path: Path
) -> None:
    program = root / "tests/training/trl_flipped_bit.py"
    done = run(program, model, scheme=scheme, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    update, request, proven = done.stdout.splitlines()[-3:]
    assert update.startswith("weight update 2: model.layers.2.mlp.gate_up_proj on rank 0 is not as received: ")
    assert "half-updated" in request
    assert proven == "1 updates proven"


def test_a_server_is_updated_for_the_asynchronous_trainer_whose_requests_it_answers(
    root: Path, tiny_model: Path, tmp_path: Path, record_property: Callable[[str, str], None]
) -> None:
    with served(tiny_model, folder=tmp_path) as url:
        arguments = ("--model", tiny_model, "--steps", ASYNC_STEPS, "--server", url)
        done = run(root / "examples/trl/async_grpo.py", *arguments, scheme="int8", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:] + (tmp_path / "server.txt").read_text()[-4000:]

    updates = range(1, ASYNC_STEPS + 2)  # one before the first request, one after each step
    pauses = re.findall(r"POST /pause\?mode=(\w+) ", (tmp_path / "server.txt").read_text())
    assert pauses == ["wait"] * len(updates)
    log = (tmp_path / "flashrl.log").read_text()
    assert "mix weight versions" not in log  # as it says of each answer that a pause with `keep` kept over an update
    lines = re.findall(
        rf"took weight update (\d+) by a layerwise reload: 50 tensors in [\d.]+ s, {LAYERS} of {LAYERS} layers proven, "
        "every digest as sent",
        log,
    )
    assert lines == [str(number) for number in updates]
    before = float(re.search(r"^before: ([\d.]+) of 512 unseen problems$", done.stdout, re.M)[1])
    after, *counts = re.search(
        r"^after: ([\d.]+), (\d+) updates proven, (\d+) sent; (\d+) requests ended by an update$", done.stdout, re.M
    ).groups()
    assert counts == [str(len(updates)), str(len(updates)), "0"]
    assert float(after) > before + 0.1

    steps = ASYNC_STEP.findall(done.stdout)
    assert [(int(step), int(proven)) for step, *_, proven, _ in steps] == list(enumerate(updates[1:], start=1))
    ratios = [(float(ratio), int(most)) for _, _, ratio, _, _, most, *_ in steps]
    assert ratios[0][1] == 0 and all(0.95 < ratio < 1.05 for ratio, most in ratios if most == 0)
    assert all(0.5 < ratio < 2 for ratio, _ in ratios), ratios  # of older rollouts: a busy host makes them older
    assert float(steps[0][3]) < 0.01  # the first rollouts are of the trainer's own weights, as INT8 has them
    assert all(0 <= float(mean) <= int(most) <= 4 for *_, mean, most, _, _ in steps)  # TRL drops what is older
    assert any(int(most) for *_, most, _, _ in steps)
    waited = sum(int(in_flight) > 0 for *_, in_flight in steps)  # how many is a matter of the host's speed
    record_property("said", f"TRL's asynchronous trainer: {waited} of {len(steps)} updates with requests in flight")


def test_the_lock_of_the_cpu_flavour_has_all_that_trl_needs() -> None:
    needed = [Requirement(line) for line in importlib.metadata.requires("trl")]
    asked = [each for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    unmet = [str(each) for each in asked if not each.specifier.contains(importlib.metadata.version(each.name))]
    assert len(asked) >= 4
    assert unmet == []

"""Engines that only FlashRL's variables tell what to do, against engines that are told by our own settings."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from engines import Engine, read_checkpoint, start_engine
from test_engine_transport import transfer

from appliance.terms.schemes import Scheme

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def fresh_answers(two_checkpoints: tuple[Path, Path]) -> dict[str, list]:
    """What engines say that are told by `Quantisation.engine_arguments()`, by scheme and checkpoint."""
    first, second = two_checkpoints
    engines = {
        "bf16 b": lambda: start_engine(second, scheme="bf16"),
        "int8 a": lambda: start_engine(first, scheme="int8"),
        "int8 b": lambda: start_engine(second, scheme="int8"),
        "head b": lambda: start_engine(second, scheme="bf16", lm_head_fp32=True),
        "fp8 b": lambda: start_engine(second, scheme="fp8-channel", emulated=True),
    }
    return {name: start().generate() for name, start in engines.items()}


def start(folder: Path) -> Engine:
    """A plain engine, as far as its arguments say."""
    return start_engine(folder, scheme="bf16")


def test_engines_differ_by_scheme_and_checkpoint(fresh_answers: dict[str, list]) -> None:
    """Without this the tests below could not fail."""
    assert all(
        one == other or fresh_answers[one] != fresh_answers[other] for one in fresh_answers for other in fresh_answers
    )


def test_the_variable_alone_makes_an_int8_engine(two_checkpoints, fresh_answers, flashrl: pytest.MonkeyPatch) -> None:
    flashrl.setenv("FLASHRL_CONFIG", "int8")
    assert start(two_checkpoints[1]).generate() == fresh_answers["int8 b"]


def test_bf16_is_the_plain_engine(two_checkpoints, fresh_answers, flashrl: pytest.MonkeyPatch) -> None:
    flashrl.setenv("FLASHRL_CONFIG", "bf16")
    assert start(two_checkpoints[1]).generate() == fresh_answers["bf16 b"]


def test_the_head_in_fp32(two_checkpoints, fresh_answers, flashrl: pytest.MonkeyPatch) -> None:
    flashrl.setenv("FLASHRL_CONFIG", "bf16")
    flashrl.setenv("FLASHRL_LMHEAD_FP32", "1")
    assert start(two_checkpoints[1]).generate() == fresh_answers["head b"]


def test_emulated_fp8_by_a_file(two_checkpoints, fresh_answers, tmp_path: Path, flashrl: pytest.MonkeyPatch) -> None:
    (tmp_path / "fp8.yaml").write_text("configs: [{fn: fp8_channel, emulated: true}]")
    flashrl.setenv("FLASHRL_CONFIG", str(tmp_path / "fp8.yaml"))
    assert start(two_checkpoints[1]).generate() == fresh_answers["fp8 b"]


@pytest.mark.parametrize("config", ["int8", "bf16"])
def test_the_last_reloaded_checkpoint_speaks(
    two_checkpoints, fresh_answers, flashrl: pytest.MonkeyPatch, config: str
) -> None:
    first, second = two_checkpoints
    flashrl.setenv("FLASHRL_CONFIG", config)
    flashrl.setenv("FLASHRL_TEST_RELOAD", f"{second},{first},{second}")
    assert start(first).generate() == fresh_answers[f"{config} b"]


def test_reloads_are_in_order(two_checkpoints, fresh_answers, flashrl: pytest.MonkeyPatch) -> None:
    first, second = two_checkpoints
    flashrl.setenv("FLASHRL_CONFIG", "int8")
    flashrl.setenv("FLASHRL_TEST_RELOAD", f"{second},{first}")
    assert start(second).generate() == fresh_answers["int8 a"]


def test_dummy_weights_wait_for_a_reload(
    two_checkpoints, fresh_answers, tmp_path: Path, flashrl: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs.yaml").write_text("configs: [{fn: int8, load_format: dummy}]")
    flashrl.setenv("FLASHRL_CONFIG", str(tmp_path / "theirs.yaml"))
    flashrl.setenv("FLASHRL_TEST_RELOAD", str(two_checkpoints[1]))
    assert start(two_checkpoints[0]).generate() == fresh_answers["int8 b"]


@pytest.mark.parametrize("load_format", ["auto", "dummy", "safetensors"])
def test_what_stands_is_said_and_checked_however_it_was_loaded(
    two_checkpoints, tmp_path: Path, flashrl: pytest.MonkeyPatch, load_format: str
) -> None:
    from appliance.errors import EngineError
    from flashrl_compat import worker

    logged: list[str] = []
    flashrl.setattr(worker.LOGGER, "info", lambda text, *values: logged.append(text % values))
    flashrl.setenv("FLASHRL_CONFIG", "int8")
    start_engine(two_checkpoints[0], scheme="bf16", load_format=load_format)
    assert sum(line.startswith("rank 0 has the scheme int8; layers by kernel: ") for line in logged) == 1
    (tmp_path / "q.yaml").write_text("configs: [{fn: int8, ignore: [model.layers.0.mlp.dwn_proj]}]")
    flashrl.setenv("FLASHRL_CONFIG", str(tmp_path / "q.yaml"))
    with pytest.raises(EngineError, match=r"^ignore: `model\.layers\.0\.mlp\.dwn_proj` is no layer of this model$"):
        start_engine(two_checkpoints[0], scheme="bf16", load_format=load_format)


def test_verls_server_takes_its_weights_by_our_sync_and_counts_them(
    two_checkpoints, fresh_answers, ways_in: pytest.MonkeyPatch
) -> None:
    """verl names its own worker extension, which would load into quantised layers as they are. Its sender is real."""
    from verl.workers.rollout.vllm_rollout import utils

    from appliance.engine.sync import SyncWorkerExtension
    from appliance.errors import SyncError
    from flashrl_compat.arguments import VERL_EXTENSION

    ways_in.setattr(utils, "set_death_signal", lambda: None)  # else this process dies with a thread
    for name, value in {
        "FLASHRL_CONFIG": "int8",
        "VERL_RAY_JOB_ID": f"test-{os.getpid()}",
        "VERL_REPLICA_RANK": "0",
    }.items():
        ways_in.setenv(name, value)
    engine = start_engine(two_checkpoints[0], scheme="bf16", worker_extension_cls=VERL_EXTENSION)
    assert isinstance(engine.worker, SyncWorkerExtension)
    first, second = map(read_checkpoint, two_checkpoints)
    for version, (weights, says) in enumerate(((second, "int8 b"), (first, "int8 a"), (second, "int8 b")), start=1):
        transfer(engine, weights)
        assert engine.llm.llm_engine.get_weight_version() == str(version)
        assert engine.generate() == fresh_answers[says]
    lost = "model.layers.1.mlp.gate_up_proj"
    with pytest.raises(SyncError, match=lost):
        transfer(engine, [(name, tensor) for name, tensor in first if name != "model.layers.1.mlp.up_proj.weight"])
    with pytest.raises(SyncError, match=rf"half-updated: 1 layer did not receive all its weights: {lost}"):
        engine.generate()


def folded_checkpoint(folder: Path, *, profile: Path, to: Path) -> Path:
    """The checkpoint that a profile's smoothing makes of another one."""
    from safetensors.torch import load_file, save_file

    from appliance.quant.profile import fold, load_smoothing

    smoothing = load_smoothing(profile)
    shutil.copytree(folder, to)
    tensors = load_file(to / FILE)
    save_file({name: fold(name, tensor, smoothing=smoothing) for name, tensor in tensors.items()}, to / FILE)
    return to


def write_smoothing(folder: Path, *, model: Path, layer: int = 0) -> Path:
    """A profile that smooths all that can be. layer: the number that the model's first one has in it."""
    from smoothings import random_smoothing
    from transformers import AutoModelForCausalLM

    from appliance.quant.profile import Origin, Profile, Settings, Smoothing, SmoothingGroup, write_profile

    def prefixed(name: str) -> str:
        return name.replace("layers.0.", f"layers.{layer}.")

    groups = tuple(
        SmoothingGroup(
            prefixed(group.source),
            tuple(map(prefixed, group.linears)),
            group.scale_K,
            head_dim=group.head_dim,
            readers_of_head=group.readers_of_head,
        )
        for group in random_smoothing(AutoModelForCausalLM.from_pretrained(model), seed=5).groups
    )
    origin = Origin(kind="calibrated", model="none")
    profile = Profile(origin=origin, scheme=Scheme.INT8, settings=Settings(), smoothing=Smoothing(groups))
    write_profile(profile, folder=folder)
    return folder


@pytest.mark.parametrize("reloaded", [False, True])
def test_smoothing_is_folded_in_when_weights_are_read(
    two_checkpoints, fresh_answers, tmp_path: Path, flashrl: pytest.MonkeyPatch, reloaded: bool
) -> None:
    """On the first load from disk and on every later one: the engine is that of the folded checkpoint, bit for bit.
    Rows of `v_proj` and `up_proj` are divided, and the biases of `v_proj`."""
    first, second = two_checkpoints
    profile = write_smoothing(tmp_path / "profile", model=first)
    expected = start_engine(
        folded_checkpoint(second, profile=profile, to=tmp_path / "folded"), scheme="int8"
    ).generate()
    assert expected != fresh_answers["int8 b"]
    (tmp_path / "q.yaml").write_text("configs: [{fn: int8, profile: profile}]")
    flashrl.setenv("FLASHRL_CONFIG", str(tmp_path / "q.yaml"))
    if reloaded:
        flashrl.setenv("FLASHRL_TEST_RELOAD", str(second))
    assert start(first if reloaded else second).generate() == expected


def test_smoothing_is_folded_in_once_by_vllms_own_loader(
    two_checkpoints, fresh_answers, tmp_path: Path, flashrl: pytest.MonkeyPatch
) -> None:
    """Which worker extensions ask to load a folder into the model that stands."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader

    write_smoothing(tmp_path / "profile", model=two_checkpoints[0])
    (tmp_path / "q.yaml").write_text("configs: [{fn: int8, profile: profile}]")
    flashrl.setenv("FLASHRL_CONFIG", str(tmp_path / "q.yaml"))
    first, second = two_checkpoints
    expected, engine = start(second).generate(), start(first)
    assert expected != fresh_answers["int8 b"] and expected != engine.generate()
    settings = engine.runner.vllm_config
    settings.model_config.model = str(second)
    with set_current_vllm_config(settings):
        get_model_loader(settings.load_config).load_weights(engine.model, settings.model_config)
    assert engine.generate() == expected
    assert engine.worker.appliance_ways_in.report.version == 1


def test_a_profile_of_another_model_is_refused_when_weights_are_read(
    two_checkpoints, tmp_path: Path, flashrl: pytest.MonkeyPatch
) -> None:
    """Its layer 9 is not there: the parts that are would be half of a group in a model with other names."""

    from appliance.errors import EngineError

    write_smoothing(tmp_path / "profile", model=two_checkpoints[0], layer=9)
    (tmp_path / "q.yaml").write_text("configs: [{fn: int8, profile: profile}]")
    flashrl.setenv("FLASHRL_CONFIG", str(tmp_path / "q.yaml"))
    with pytest.raises(EngineError, match=r"the profile smooths model\.layers\.9\..* which this model does not have"):
        start(two_checkpoints[0])


def test_a_reload_that_misses_a_tensor_stops_the_engine(
    two_checkpoints, tmp_path: Path, flashrl: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file, save_file

    from appliance.errors import SyncError

    first, second = two_checkpoints
    shutil.copytree(second, tmp_path / "short")
    tensors = load_file(second / FILE)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "short" / FILE)
    flashrl.setenv("FLASHRL_CONFIG", "int8")
    flashrl.setenv("FLASHRL_TEST_RELOAD", str(tmp_path / "short"))
    with pytest.raises(SyncError) as raised:
        start(first)
    assert str(raised.value) == (
        "weight update: 1 layer did not receive all its weights: "
        "model.layers.1.mlp.gate_up_proj (11264 of 22528 elements)"
    )

"""Other toolkits' ways to update an engine, call by call: proven, or refused. docs/toolkits.md has their versions."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from engines import Engine, free_engine, read_checkpoint, start_engine
from toolkit_workers import NeMoRLWorker, OpenRLHFWorker, PrimeRLWorker, SkyRLTransfer, SkyRLWorker, Tensors
from vllm.config import WeightTransferConfig

from appliance.errors import SyncError

pytestmark = [pytest.mark.engine, pytest.mark.slow]

Update = Callable[[Engine, Tensors, Path], None]
SCHEMES = ("int8", "bf16")
LAYER_OF = {
    "model.layers.1.mlp.up_proj.weight": "model.layers.1.mlp.gate_up_proj",
    "model.layers.0.self_attn.k_proj.bias": "model.layers.0.self_attn.qkv_proj",
    "model.norm.weight": "model.norm",
}


@pytest.fixture(scope="module")
def fresh_answers(two_checkpoints: tuple[Path, Path]) -> dict[str, list]:
    """What engines say that were started with the second checkpoint, by scheme."""
    return {scheme: start_engine(two_checkpoints[1], scheme=scheme).generate() for scheme in SCHEMES}


def trl(engine: Engine, tensors: Tensors, folder: Path) -> None:
    """trl 1.16.0, generation/vllm_generation.py: the trainer's float32, a tensor a call."""
    for name, tensor in tensors:
        model = engine.llm.llm_engine.model_executor.driver_worker.model_runner.model
        model.load_weights([(name, tensor.float())])
    engine.llm.reset_prefix_cache()


def openrlhf(engine: Engine, tensors: Tensors, folder: Path) -> None:
    engine.llm.reset_prefix_cache()  # before, not after
    for name, tensor in tensors:
        engine.llm.collective_rpc("update_weight", args=(name, tensor))


def skyrl(engine: Engine, tensors: Tensors, folder: Path) -> None:
    engine.llm.start_weight_update()
    for start in range(0, len(tensors), 5):
        engine.llm.update_weights({"update_info": {"weights": tensors[start : start + 5]}})
    engine.llm.finish_weight_update()
    engine.llm.reset_prefix_cache()


def prime_rl(engine: Engine, tensors: Tensors, folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors")
    engine.llm.collective_rpc("update_weights_from_path", args=(str(folder),))


def nemo_rl(engine: Engine, tensors: Tensors, folder: Path) -> None:
    buckets = [tensors[start : start + 4] for start in range(0, len(tensors), 4)]
    engine.llm.collective_rpc("update_weights_via_ipc_zmq", args=(buckets,))  # what failed is logged there, no more


def nemo_rl_by_reload(engine: Engine, tensors: Tensors, folder: Path) -> None:
    buckets = [tensors[start : start + 4] for start in range(0, len(tensors), 4)]
    engine.llm.collective_rpc("update_weights_from_collective", args=(buckets,))


WAYS = {trl: None, openrlhf: OpenRLHFWorker, skyrl: SkyRLWorker, prime_rl: PrimeRLWorker, nemo_rl: NeMoRLWorker}


@pytest.fixture(autouse=True)
def skyrls_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    monkeypatch.setitem(WeightTransferEngineFactory._registry, "skyrl_ipc", lambda: SkyRLTransfer)


def start(folder: Path, way: Update, **settings: object) -> Engine:
    worker = NeMoRLWorker if way is nemo_rl_by_reload else WAYS[way]
    if worker:
        settings["worker_extension_cls"] = f"{worker.__module__}.{worker.__name__}"
    if way is skyrl:
        settings["weight_transfer_config"] = WeightTransferConfig(backend="skyrl_ipc")
    return start_engine(folder, scheme="bf16", **settings)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_two_updates_are_proven_and_the_engine_is_as_a_fresh_one(
    two_checkpoints: tuple[Path, Path],
    fresh_answers: dict,
    tmp_path: Path,
    ways_in: pytest.MonkeyPatch,
    way: Update,
    scheme: str,
) -> None:
    old, new = map(read_checkpoint, two_checkpoints)
    ways_in.setenv("FLASHRL_CONFIG", scheme)
    engine = start(two_checkpoints[0], way)
    before = engine.generate()
    way(engine, new, tmp_path / "new")
    assert engine.generate() == fresh_answers[scheme] != before
    way(engine, old, tmp_path / "old")
    assert engine.generate() == before
    assert engine.llm.collective_rpc("appliance_weights", args=(False,)) == [(2, "whole", "")]
    free_engine(engine)


@pytest.mark.parametrize("way", [openrlhf, prime_rl], ids=lambda way: way.__name__)
def test_updates_of_a_model_behind_cuda_graphs_are_proven_too(
    two_checkpoints, fresh_answers: dict, tmp_path: Path, ways_in: pytest.MonkeyPatch, way: Update
) -> None:
    ways_in.setenv("FLASHRL_CONFIG", "int8")
    engine = start(two_checkpoints[0], way)
    engine.behind_graphs(ways_in)
    way(engine, read_checkpoint(two_checkpoints[1]), tmp_path)
    assert engine.generate() == fresh_answers["int8"]
    assert engine.llm.collective_rpc("appliance_weights", args=(False,)) == [(1, "whole", "")]


@pytest.mark.parametrize("lost", LAYER_OF, ids=lambda name: name.split(".")[-2])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_tensor_that_never_comes_is_an_error_that_names_its_layer(
    two_checkpoints, tmp_path: Path, ways_in: pytest.MonkeyPatch, way: Update, lost: str
) -> None:
    ways_in.setenv("FLASHRL_CONFIG", "int8")
    engine = start(two_checkpoints[0], way)
    with pytest.raises(SyncError, match=re.escape(LAYER_OF[lost])):
        way(engine, [(name, tensor) for name, tensor in read_checkpoint(two_checkpoints[1]) if name != lost], tmp_path)
        engine.generate()
    assert engine.llm.collective_rpc("appliance_weights", args=(False,))[0][0] == 0
    free_engine(engine)


SLEEPS = {trl: 2, openrlhf: 1, skyrl: 2, nemo_rl: 1}  # trl: `vllm_enable_sleep_mode`


@pytest.mark.parametrize("way", SLEEPS, ids=lambda way: way.__name__)
def test_an_engine_that_sleeps_while_the_trainer_trains_wakes_with_the_new_weights(
    two_checkpoints, fresh_answers: dict, tmp_path: Path, ways_in: pytest.MonkeyPatch, way: Update
) -> None:
    """Their weights wake first, are updated, and then the cache wakes. A CPU's worker sleeps by doing nothing."""
    ways_in.setenv("FLASHRL_CONFIG", "int8")
    engine = start(two_checkpoints[0], way)
    core = engine.llm.llm_engine.engine_core.engine_core
    for number, folder in enumerate(two_checkpoints[::-1], start=1):
        engine.llm.reset_prefix_cache()
        engine.llm.sleep(level=SLEEPS[way])
        engine.llm.wake_up(tags=["weights"])
        way(engine, read_checkpoint(folder), tmp_path)
        assert core.is_scheduler_paused()
        engine.llm.wake_up(tags=["kv_cache"])
        assert engine.llm.collective_rpc("appliance_weights", args=(False,)) == [(number, "whole", "")]
        says = engine.generate()
        assert (says == fresh_answers["int8"]) == (number == 1)
    free_engine(engine)


@pytest.mark.parametrize(("way", "clears"), [(openrlhf, True), (prime_rl, False)], ids=["openrlhf", "prime_rl"])
def test_a_request_that_a_toolkit_keeps_over_an_update_goes_on_and_is_told_of(
    two_checkpoints, fresh_answers: dict, tmp_path: Path, ways_in: pytest.MonkeyPatch, way: Update, clears: bool
) -> None:
    """openrlhf's `partial_rollout_enable`; prime-rl's every update."""
    from vllm import SamplingParams

    from flashrl_compat import core as module

    warnings: list[str] = []
    ways_in.setattr(module.LOGGER, "warning", lambda text, *values: warnings.append(text % values))
    ways_in.setenv("FLASHRL_CONFIG", "int8")
    engine = start(two_checkpoints[0], way)
    llm, core = engine.llm.llm_engine, engine.llm.llm_engine.engine_core.engine_core
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    name = llm.add_request("kept", {"prompt_token_ids": [1, 2, 3]}, params)
    llm.step()
    llm.step()
    core.pause_scheduler("keep", clears)
    way(engine, read_checkpoint(two_checkpoints[1]), tmp_path)
    core.resume_scheduler()
    ends = []
    while llm.has_unfinished_requests():
        ends += [
            (each.outputs[0].finish_reason, len(each.outputs[0].token_ids)) for each in llm.step() if each.finished
        ]
    assert ends == [("length", 8)]
    assert warnings == [f"1 requests mix weight versions 0 and 1: {name}"]
    assert engine.generate() == fresh_answers["int8"]
    free_engine(engine)


def test_prime_rls_nixl_ends_in_an_error(two_checkpoints, ways_in: pytest.MonkeyPatch) -> None:
    ways_in.setenv("FLASHRL_CONFIG", "bf16")
    engine = start(two_checkpoints[0], prime_rl)
    with pytest.raises(SyncError, match="layers did not receive all their weights"):
        engine.llm.collective_rpc("update_weights_from_nixl")
    with pytest.raises(SyncError, match="half-updated"):
        engine.generate()
    free_engine(engine)


def test_a_copy_into_a_parameter_is_not_seen(two_checkpoints, ways_in: pytest.MonkeyPatch) -> None:
    """So docs/toolkits.md says."""
    ways_in.setenv("FLASHRL_CONFIG", "int8")
    engine = start(two_checkpoints[0], prime_rl)
    before = engine.generate()
    norm = next(tensor for name, tensor in read_checkpoint(two_checkpoints[0]) if name == "model.norm.weight")
    engine.llm.collective_rpc("load_weights_kernel", args=([("model.norm.weight", -norm)],))
    assert engine.generate() != before
    assert engine.llm.collective_rpc("appliance_weights", args=(False,)) == [(0, "whole", "")]
    free_engine(engine)


@pytest.mark.parametrize("way", [nemo_rl, nemo_rl_by_reload], ids=lambda way: way.__name__)
def test_nemo_rls_engine_starts_with_no_checkpoint_and_has_the_weights_that_came(
    two_checkpoints, fresh_answers: dict, tmp_path: Path, ways_in: pytest.MonkeyPatch, way: Update
) -> None:
    """Its `load_format` is `dummy` where it trains."""
    ways_in.setenv("FLASHRL_CONFIG", "int8")
    engine = start(two_checkpoints[0], way, load_format="dummy")
    assert engine.generate() != fresh_answers["int8"]
    way(engine, read_checkpoint(two_checkpoints[1]), tmp_path)
    assert engine.generate() == fresh_answers["int8"]
    assert engine.llm.collective_rpc("appliance_weights", args=(False,)) == [(1, "whole", "")]
    free_engine(engine)

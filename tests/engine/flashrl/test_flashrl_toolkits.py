"""Other toolkits' ways to update an engine, call by call: proven, or refused. docs/toolkits.md has their versions."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from engines import Engine, free_engine, read_checkpoint, start_engine
from toolkit_workers import NeMoRLWorker, OpenRLHFWorker, PrimeRLWorker, SkyRLWorker, Tensors
from vllm.model_executor.model_loader.reload import layerwise

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
def told(two_checkpoints: tuple[Path, Path]) -> dict[str, list]:
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layerwise, "get_numel_loaded", layerwise.get_numel_loaded)  # put back at the end
        engine.llm.collective_rpc("skyrl_start_weight_update")
        for start in range(0, len(tensors), 5):
            engine.llm.collective_rpc("update_weights_ipc", args=(tensors[start : start + 5],))
        engine.llm.collective_rpc("skyrl_finish_weight_update")


def prime_rl(engine: Engine, tensors: Tensors, folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors")
    engine.llm.collective_rpc("update_weights_from_path", args=(str(folder),))


def nemo_rl(engine: Engine, tensors: Tensors, folder: Path) -> None:
    buckets = [tensors[start : start + 4] for start in range(0, len(tensors), 4)]
    engine.llm.collective_rpc("update_weights_via_ipc_zmq", args=(buckets,))  # what failed is logged there, no more


WAYS = {trl: None, openrlhf: OpenRLHFWorker, skyrl: SkyRLWorker, prime_rl: PrimeRLWorker, nemo_rl: NeMoRLWorker}


def start(folder: Path, way: Update) -> Engine:
    worker = WAYS[way]
    extension = {"worker_extension_cls": f"{worker.__module__}.{worker.__name__}"} if worker else {}
    return start_engine(folder, scheme="bf16", **extension)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_two_updates_are_proven_and_the_engine_is_as_a_fresh_one(
    two_checkpoints: tuple[Path, Path],
    told: dict,
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
    assert engine.generate() == told[scheme] != before
    way(engine, old, tmp_path / "old")
    assert engine.generate() == before
    assert engine.llm.collective_rpc("appliance_weights", args=(False,)) == [(2, "", "")]
    free_engine(engine)


@pytest.mark.parametrize("way", [openrlhf, skyrl], ids=lambda way: way.__name__)
def test_updates_of_a_model_behind_cuda_graphs_are_proven_too(
    two_checkpoints, told: dict, tmp_path: Path, ways_in: pytest.MonkeyPatch, way: Update
) -> None:
    ways_in.setenv("FLASHRL_CONFIG", "int8")
    engine = start(two_checkpoints[0], way)
    engine.behind_graphs(ways_in)
    way(engine, read_checkpoint(two_checkpoints[1]), tmp_path)
    assert engine.generate() == told["int8"]
    assert engine.llm.collective_rpc("appliance_weights", args=(False,)) == [(1, "", "")]


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

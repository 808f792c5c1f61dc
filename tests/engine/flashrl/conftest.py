"""Tiny checkpoints for FlashRL's surface, and engines that are chosen by environment variables alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import make_checkpoint
from plugin_patches import put_back_at_end

SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 176}


@pytest.fixture(scope="session")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of the same shapes and different weights, with a tokenizer, as a server needs one."""
    from appliance.tasks.tiny_model import save_tokenizer

    root = tmp_path_factory.mktemp("flashrl-checkpoints")
    folders = make_checkpoint(root / "a", seed=11, **SHAPE), make_checkpoint(root / "b", seed=12, **SHAPE)
    for folder in folders:
        save_tokenizer(folder, max_positions=256)
    return folders


@pytest.fixture
def flashrl(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """FlashRL's patch, live in this process until the test ends; no variable of FlashRL's is set yet."""
    import os

    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from appliance import patch
    from flashrl_compat.arguments import patch_engine_arguments
    from flashrl_compat.first_load import patch_first_load
    from flashrl_compat.variables import VARIABLES

    for name in [*VARIABLES, "VERL_REPLICA_RANK", "RANK", "APPLIANCE_PLAN"]:
        monkeypatch.delenv(name, raising=False)
    assert not any(name.startswith("FLASHRL_") for name in os.environ)
    applied, ours = patch._APPLIED, patch.recorded()  # those of the engine stay, whoever applies them
    monkeypatch.setattr(patch, "_APPLIED", {name: record for name, record in applied.items() if name in ours})
    for owner, name in ((EngineArgs, "create_engine_config"), (DefaultModelLoader, "load_weights")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back at the end
    patch_engine_arguments()
    patch_first_load()
    yield monkeypatch
    applied |= {name: record for name, record in patch._APPLIED.items() if name in ours}


@pytest.fixture
def ways_in(flashrl: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """FLASHRL_CONFIG as the plugin has it, whole: the core follows its workers' updates."""
    from flashrl_compat import core, layerwise, refusals, shared_memory, weight_versions

    put_back_at_end(flashrl)
    core.patch_core()
    refusals.patch_refusals()
    weight_versions.patch_weight_versions()
    layerwise.patch_layerwise()
    shared_memory.register()
    return flashrl

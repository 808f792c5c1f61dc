"""Engines that the tests of this folder share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engines import Engine, make_checkpoint, start_engine

from appliance.terms.environment import EXACT_ON_CPU

os.environ |= EXACT_ON_CPU  # as a plan has it with one flow, whose log-probs are compared bit for bit


@pytest.fixture(autouse=True)
def float32_is_torchs_default() -> Iterator[None]:
    """While vLLM loads a model its type is torch's default; after a load that fails it stays so."""
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of the same shapes and different weights."""
    root = tmp_path_factory.mktemp("checkpoints")
    return make_checkpoint(root / "a", seed=1), make_checkpoint(root / "b", seed=2)


@pytest.fixture(scope="session", params=["bf16", "int8"])
def engine(request: pytest.FixtureRequest, checkpoints: tuple[Path, Path]) -> Iterator[Engine]:
    yield start_engine(checkpoints[0], scheme=request.param)

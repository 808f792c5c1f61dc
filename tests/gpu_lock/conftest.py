"""Tests of the GPU flavour on a machine without a GPU: `make test-gpu-lock`, by the Python of requirements/gpu.txt.

They are no part of `make test`: an environment has one flavour. What a GPU must do is done by torch (hopper.py).
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

CUDA = Path(sysconfig.get_path("purelib")) / "nvidia/cu13"
os.environ |= {  # as the image has them, and as a plan gives them
    "CUDA_HOME": str(CUDA),
    "PATH": f"{os.environ['PATH']}:{CUDA / 'bin'}",
    "HF_HUB_OFFLINE": "1",
    "VERL_USE_EXTERNAL_MODULES": "appliance.trainer.worker",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "flashrl_appliance",
}


@pytest.fixture(scope="session")
def root() -> Path:
    """Of the repository."""
    return Path(__file__).parents[2]


@pytest.fixture(scope="session")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM sees a Hopper; its compiled parts are loaded, our plugin is registered, torch is in the kernels' place."""
    import hopper

    hopper.load_without_driver(tmp_path_factory.mktemp("driver"))
    hopper.take_its_place()
    import vllm._C_stable_libtorch  # noqa: F401  declares the operators
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    library = hopper.register_kernels()
    yield
    library._destroy()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"gpu lock: {len(terminalreporter.stats.get('passed', []))} tests passed")

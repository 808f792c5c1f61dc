"""Which platform verl finds with ours among its own."""

from __future__ import annotations

import pytest
from verl.plugin.platform import platform_manager

from appliance.terms.environment import PLATFORM_VARIABLE
from appliance.trainer.cpu_platform import CpuPlatform


def test_a_process_without_a_gpu_of_a_run_on_gpus_is_not_on_our_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    assert platform_manager.PlatformRegistry.get("cpu") is CpuPlatform
    assert platform_manager._detect_platform_name() == "cpu"  # named by the environment of these tests
    monkeypatch.delenv(PLATFORM_VARIABLE)
    assert platform_manager._detect_platform_name() == "nvidia"

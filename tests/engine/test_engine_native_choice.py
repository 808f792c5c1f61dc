"""What vLLM's own `fp8-block` runs on by vLLM's order of kernels: one whose codes and scales can be read.

The governor's `raise-precision` ranks layers by them where there is no profile, and preflight lets it. Only the order
and the conditions are held here: no GPU is asked.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm import marlin
from vllm.model_executor.kernels.linear.scaled_mm.b12x_block import B12xFp8BlockScaledMMKernel
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFp8BlockScaledMMKernel
from vllm.model_executor.kernels.linear.scaled_mm.humming import HummingFP8ScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel
from vllm.platforms.interface import PlatformEnum

from appliance.engine.fp8 import _READ_ROWS
from appliance.terms.devices import GPUS, Gpu

pytestmark = pytest.mark.engine


def test_a_kernel_of_blocks_that_packs_them_is_behind_one_that_does_not() -> None:
    order = linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA]
    packing = [kernel for kernel in order if kernel not in _READ_ROWS]
    assert packing == [B12xFp8BlockScaledMMKernel, marlin.MarlinFP8ScaledMMLinearKernel, HummingFP8ScaledMMLinearKernel]
    # Blackwell 12.x has both, and any GPU Triton.
    assert order.index(CutlassFp8BlockScaledMMKernel) < order.index(B12xFp8BlockScaledMMKernel)
    assert order.index(TritonFp8BlockScaledMMKernel) < order.index(HummingFP8ScaledMMLinearKernel)


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS.values() if gpu.has_fp8], ids=lambda gpu: gpu.name)
def test_marlin_is_for_gpus_without_fp8(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marlin, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr(marlin, "is_fp8_marlin_supported", lambda: True)
    monkeypatch.delenv("VLLM_TEST_FORCE_FP8_MARLIN", raising=False)
    major, minor = gpu.capability
    supported = marlin.MarlinFP8ScaledMMLinearKernel.is_supported
    assert not supported(10 * major + minor)[0] and supported(80)[0]

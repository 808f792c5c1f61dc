"""What vLLM's own `fp8-block` runs on by vLLM's order of kernels: one whose codes and scales can be read.

The governor's `raise-precision` ranks layers by them where there is no profile, and preflight lets it. Only the order
and the conditions are held here: no GPU is asked.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.b12x import B12xFp8BlockScaledMMKernel
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFp8BlockScaledMMKernel
from vllm.platforms.interface import PlatformEnum

from appliance.engine.fp8 import _READ_ROWS
from appliance.terms.devices import GPUS, Gpu
from appliance.terms.environment import child_env

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS.values() if gpu.has_fp8], ids=lambda gpu: gpu.name)
def test_a_kernel_of_blocks_that_packs_them_is_disabled_or_behind_one_that_does_not(gpu: Gpu) -> None:
    environment = dict(
        child_env(
            Path("/runs/a"),
            is_cpu=False,
            threads=2,
            kv_cache_gb=1,
            offline=True,
            backends=(),
            capability=gpu.capability,
        )
    )
    disabled = environment["VLLM_DISABLED_KERNELS"].split(",")
    order = linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA]
    assert set(disabled) < {kernel.__name__ for kernel in order}
    packing = [kernel for kernel in order if kernel not in _READ_ROWS and kernel.__name__ not in disabled]
    assert packing == [B12xFp8BlockScaledMMKernel]  # of Blackwell 12.x, which has CUTLASS too; any GPU has Triton
    assert order.index(CutlassFp8BlockScaledMMKernel) < order.index(B12xFp8BlockScaledMMKernel)

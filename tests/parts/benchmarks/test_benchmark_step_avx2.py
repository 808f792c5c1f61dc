"""`benchmarks.step --avx2`: which kernels its processes take."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from benchmarks.step.systems import AS_AVX2

ASKS = """
import torch
print(torch.backends.cpu.get_cpu_capability())
print([name for name in dir(torch.cpu) if name.startswith("_is_") and getattr(torch.cpu, name)()])
print(torch.cpu.get_capabilities()["architecture"])
from appliance.engine.int8 import NO_AMX_TILES, no_amx_tiles
from appliance.patch import applied_patches, apply_patch
apply_patch(NO_AMX_TILES, no_amx_tiles)  # of a source that it still is
print(*applied_patches())
weight = torch.randn(64, 64).bfloat16()
torch.nn.functional.linear(weight, weight)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 is of x86-64")
def test_no_kernel_of_avx_512_is_taken() -> None:
    variables = {"PYTHONPATH": str(AS_AVX2), "ONEDNN_VERBOSE": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
    command = [sys.executable, "-c", ASKS]
    ended = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    printed = [line for line in ended.stdout.splitlines() if not line.startswith("INFO")]  # of vLLM's import
    assert printed == [
        "AVX2",
        "['_is_avx2_supported']",
        "x86_64",
        "cpu-no-amx-tiles",
    ]  # no line is oneDNN's

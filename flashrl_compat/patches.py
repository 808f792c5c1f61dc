"""Our patches of vLLM in both of its builds. The sources are the same in the wheel for GPUs (vllm-0.28.0-cp38-abi3-
manylinux_2_28_x86_64.whl, the one of requirements/gpu.txt): compared, not run there. Only its version is another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from vllm.platforms import current_platform

from appliance.patch import Patch, apply_patch


def apply_here(patch: Patch, replacement: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """patch: as of the build for a CPU.  Raises PatchError."""
    if not current_platform.is_cpu():
        patch = dataclasses.replace(patch, version=patch.version.removesuffix("+cpu"))
    apply_patch(patch, replacement)

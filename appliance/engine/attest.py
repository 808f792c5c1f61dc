"""What a vLLM worker says of itself, read off the model that stands there and not off the settings."""

from __future__ import annotations

import importlib.metadata
import os
from collections import Counter
from pathlib import Path
from typing import Any

from torch.nn import Module

from appliance import patch
from appliance.engine.int8 import Int8LinearMethod
from appliance.plan.env import PLAN_VARIABLE
from appliance.plan.model import RunPlan, read_plan
from appliance.quant.scheme import Scheme
from appliance.run.attest import fingerprint, write_attestation

REPLICA_VARIABLE = "VERL_REPLICA_RANK"  # set by verl for each rollout server


def live_scheme(model: Module) -> tuple[Scheme, dict[str, int]]:
    """The scheme the linear layers really have, and how many layers run on which kernel."""
    kernels: Counter[str] = Counter()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, Int8LinearMethod):
            kernels[method.kernel_name] += 1
        elif method is not None:
            kernels[type(method).__name__] += 1
    quantised = any(isinstance(getattr(m, "quant_method", None), Int8LinearMethod) for m in model.modules())
    return (Scheme.INT8 if quantised else Scheme.BF16), dict(kernels)


def attest_rollout_worker(model: Module, *, vllm_config: Any, rank: int) -> None:
    """Write `attest/rollout-<replica>-<rank>.json`. Outside a run of ours (no plan named) there is nothing to write to.

    rank: within the engine (tensor parallel). The attested rank counts over replicas: replica * tensor_parallel + rank.
    """
    plan_path = os.environ.get(PLAN_VARIABLE)
    if not plan_path:
        return
    plan = read_plan(Path(plan_path))
    scheme, kernels = live_scheme(model)
    replica = int(os.environ.get(REPLICA_VARIABLE, "0"))
    write_attestation(
        Path(plan.run_dir),
        process=f"rollout-{replica}-{rank}",
        role="rollout",
        rank=replica * vllm_config.parallel_config.tensor_parallel_size + rank,
        scheme=scheme,
        emulated=False,
        patches=patch.applied(),
        versions=_versions(plan),
        fingerprint=fingerprint(),
        detail={
            "kernels": kernels,
            "dtype": str(vllm_config.model_config.dtype),
            "model": vllm_config.model_config.model,
        },
    )


def _versions(plan: RunPlan) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name, _ in plan.pins}

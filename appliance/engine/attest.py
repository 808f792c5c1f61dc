"""What a vLLM worker says of itself, read off the model that stands there and not off the settings."""

from __future__ import annotations

import importlib.metadata
import os
from collections import Counter
from pathlib import Path
from typing import Any

from torch.nn import Module
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from appliance import patch
from appliance.engine.int8 import Int8LinearMethod, KeptLinearMethod
from appliance.errors import EngineError
from appliance.plan.env import PLAN_VARIABLE
from appliance.plan.model import RunPlan, read_plan
from appliance.quant.scheme import Scheme
from appliance.run.attest import fingerprint, write_attestation

REPLICA_VARIABLE = "VERL_REPLICA_RANK"  # set by verl for each rollout server


def live_scheme(model: Module) -> tuple[Scheme, dict[str, int]]:
    """The scheme the linear layers really have, and how many layers run on which kernel.

    Raises EngineError when only a part of the layers that should be INT8 is.
    """
    methods = {name: layer.quant_method for name, layer in model.named_modules() if hasattr(layer, "quant_method")}
    kernels = Counter(_kernel(method) for method in methods.values())
    int8 = [name for name, method in methods.items() if isinstance(method, Int8LinearMethod)]
    fallen = [name for name, method in methods.items() if _is_plain_linear(method)]
    if int8 and fallen:
        raise EngineError(f"{len(fallen)} linear layers are not INT8 and were not to be left out, first {fallen[0]}")
    return (Scheme.INT8 if int8 else Scheme.BF16), dict(kernels)


def _kernel(method: object) -> str:
    return method.kernel_name if isinstance(method, Int8LinearMethod) else type(method).__name__


def _is_plain_linear(method: object) -> bool:
    return isinstance(method, UnquantizedLinearMethod) and not isinstance(method, KeptLinearMethod)


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

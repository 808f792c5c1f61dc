"""What a vLLM worker attests of itself, read from the model in its memory and not from its settings."""

from __future__ import annotations

import importlib.metadata
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from appliance import patch
from appliance.engine.config import (
    Fp32HeadMethod,
    KeptExpertsMethod,
    KeptLinearMethod,
    is_router,
    require_ignored_layers,
    require_known_layers,
)
from appliance.engine.kv_cache import kv_cache_format
from appliance.engine.quantised import Quantising
from appliance.errors import EngineError
from appliance.record.attestations import Attestation, fingerprint, write_attestation
from appliance.record.plan import RunPlan, read_plan
from appliance.sync.precision import read_generation
from appliance.terms.counts import counted
from appliance.terms.environment import PLAN_VARIABLE
from appliance.terms.schemes import Scheme

REPLICA_VARIABLE = "VERL_REPLICA_RANK"  # set by verl for each rollout server


@dataclass(frozen=True)
class LiveScheme:
    """Scheme and kernels of a model's layers, as read from the layers themselves."""

    scheme: Scheme
    emulated: bool
    lm_head_fp32: bool
    kernels: dict[str, int]
    """Number of layers that run on each kernel, by its name."""


def live_scheme(model: Module) -> LiveScheme:
    """Read off the layers. Those that are in BF16 on purpose (`ignore`, routers, embeddings, lm_head) count as kernels.
    Raises EngineError when only a part of the layers that should be quantised is, or layers differ in their scheme."""
    methods = {name: layer.quant_method for name, layer in model.named_modules() if hasattr(layer, "quant_method")}
    quantising = [method for method in methods.values() if isinstance(method, Quantising)]
    schemes = sorted({method.scheme for method in quantising})
    if len(schemes) > 1:
        raise EngineError(f"layers of one engine run {', '.join(schemes)}")
    if schemes:
        require_known_layers(model)
        fallen = [name for name, method in methods.items() if _has_fallen(method, model.get_submodule(name), name=name)]
        if fallen:
            raise EngineError(
                f"{counted(len(fallen), 'layer is', plural='layers are')} not {schemes[0]} and not to be left out, "
                f"the first is {fallen[0]}"
            )
    kernels = [
        method.kernel_name if isinstance(method, Quantising) else type(method).__name__ for method in methods.values()
    ]
    return LiveScheme(
        scheme=schemes[0] if schemes else Scheme.BF16,
        emulated=any(method.emulated for method in quantising),
        lm_head_fp32=any(isinstance(method, Fp32HeadMethod) for method in methods.values()),
        kernels=dict(Counter(kernels)),
    )


def _quantised(model: Module) -> list[str]:
    return [name for name, each in model.named_modules() if isinstance(getattr(each, "quant_method", None), Quantising)]


def _has_fallen(method: object, layer: Module, *, name: str) -> bool:
    """Say whether a layer is in BF16 and not on purpose. Some models make their routers without a quantisation config,
    so that the method does not say it."""
    if isinstance(method, KeptLinearMethod | KeptExpertsMethod) or is_router(layer, prefix=name):
        return False
    return isinstance(method, UnquantizedLinearMethod | UnquantizedFusedMoEMethod)


def plan_of_process() -> RunPlan | None:
    """Read the plan of this process's run. None outside a run, where nobody sends a list and nobody asks."""
    path = os.environ.get(PLAN_VARIABLE)
    return read_plan(Path(path)) if path else None


def replica_of_process() -> int:
    return int(os.environ.get(REPLICA_VARIABLE, "0"))


def attest_rollout_worker(model: Module, *, vllm_config: Any, rank: int) -> None:
    """Write `attest/rollout-<replica>-<rank>.json`. Outside a run of ours (no plan named) there is nothing to write to.

    rank: within the engine (tensor parallel). The attested rank counts over replicas.
    Raises EngineError, outside a run too, where the model is not what the settings say.
    """
    require_ignored_layers(model, vllm_config.quant_config)
    plan = plan_of_process()
    if plan is None:
        return
    live, replica = live_scheme(model), replica_of_process()
    dtype, asked = vllm_config.model_config.dtype, plan.trainer.dtype
    if dtype is not getattr(torch, asked.in_torch):
        raise EngineError(f"replica {replica} computes in {dtype}, the plan says {asked}")
    cache = kv_cache_format(model)
    if cache is not plan.rollout.kv_cache:
        raise EngineError(f"replica {replica} has a KV cache of format {cache}, the plan says {plan.rollout.kv_cache}")
    write_attestation(
        Path(plan.run_dir),
        Attestation(
            process=f"rollout-{replica}-{rank}",
            role="rollout",
            rank=plan.topology.rollout_rank(replica, rank=rank),
            scheme=str(live.scheme),
            emulated=live.emulated,
            patches=tuple(patch.applied_patches()),
            versions={name: importlib.metadata.version(name) for name, _ in plan.pins},
            fingerprint=fingerprint(),
            detail={
                "kernels": live.kernels,
                "quantised": _quantised(model),
                "lm_head_fp32": live.lm_head_fp32,
                "dtype": str(dtype),
                "kv_cache": str(cache),
                "model": vllm_config.model_config.model,
                "generation": read_generation(Path(plan.run_dir)).number,
                "pid": os.getpid(),
                "threads": torch.get_num_threads(),
            },
        ),
    )

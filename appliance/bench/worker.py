"""vLLM's worker with two additions: a budget for weights and KV cache together, and what it holds, in numbers."""

from __future__ import annotations

import dataclasses
import json

import torch
from torch import Tensor
from torch.nn import Module
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

from appliance.bench.job import GIB, EngineFacts
from appliance.engine.attest import live_scheme
from appliance.engine.quantised import Quantising
from appliance.errors import EngineError

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as DeviceWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as DeviceWorker

WORKER = f"{__name__}.BudgetWorker"
MEMORY_KEY = "appliance_memory_bytes"  # in vLLM's additional_config


class BudgetWorker(DeviceWorker):
    """Named in `worker_cls`."""

    def determine_available_memory(self) -> int:
        """vLLM calls it when the model stands and the KV cache does not. Raises EngineError when no room is left."""
        budget = self.vllm_config.additional_config[MEMORY_KEY]
        if budget is not None:
            weights = weight_bytes(self.model_runner.model)
            if weights >= budget:
                raise EngineError(
                    f"bench: the weights take {weights / GIB:.4f} GiB, --kv-memory gives {budget / GIB:.4f} GiB",
                    hint="give more: it is the memory for weights and KV cache together",
                )
            self.cache_config.kv_cache_memory_bytes = budget - weights
        return super().determine_available_memory()

    def bench_facts(self) -> str:
        """EngineFacts of this worker as JSON, which every way to reach a worker can carry."""
        runner = self.model_runner
        live = live_scheme(runner.model)
        cache = runner.kv_cache_config
        facts = EngineFacts(
            scheme=live.scheme,
            weight_bytes=weight_bytes(runner.model),
            kv_bytes=sum(tensor.size for tensor in cache.kv_cache_tensors),
            sequences=int(get_max_concurrency_for_kv_cache_config(self.vllm_config, cache)),
            kernels=tuple(sorted(live.kernels.items())),
        )
        return json.dumps(dataclasses.asdict(facts))


def weight_bytes(model: Module) -> int:
    """Bytes of a loaded model's weights, each once, in the form that is multiplied.

    A CPU kernel that packs a weight leaves nothing of it in the layer. What it holds is counted from the shape that
    vLLM recorded before loading: one byte an element where the layer is quantised, else the recorded type.
    """
    live: dict[int, int] = {}
    held = 0
    for layer in model.modules():
        for tensor in layer.parameters(recurse=False):
            live[tensor.data_ptr() if tensor.numel() else 0] = tensor.nbytes
        for name, recorded in get_layerwise_info(layer).restore_metadata[0].items():
            if _is_gone(getattr(layer, name, None)):
                held += recorded.numel() * _item_bytes(layer, recorded)
    return sum(live.values()) + held


def _is_gone(tensor: Tensor | None) -> bool:
    return tensor is None or not tensor.numel() or tensor.device == torch.device("meta")


def _item_bytes(layer: Module, recorded: Tensor) -> int:
    is_code = isinstance(getattr(layer, "quant_method", None), Quantising) and recorded.ndim > 1
    return 1 if is_code else recorded.itemsize

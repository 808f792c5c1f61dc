"""FLASHRL_TEST_RELOAD: a worker that takes other checkpoints when the engine has started, each as one weight update.

vLLM starts it by its name in `worker_cls`. It speaks as the last checkpoint.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from appliance.engine.update import WeightUpdate
from flashrl_compat.loader import smoothing_of
from flashrl_compat.variables import LOGGER

WORKER_CLASS = f"{__name__}.ReloadingWorker"
RELOAD_KEY = "flashrl_test_reload"  # in vLLM's `additional_config`, which reaches every worker

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class ReloadingWorker(Worker):
    def compile_or_warm_up_model(self) -> Any:
        """The last step of an engine's start: memory is measured, and CUDA graphs hold the addresses of the weights."""
        times = super().compile_or_warm_up_model()
        checkpoints = self.vllm_config.additional_config[RELOAD_KEY]
        reload_checkpoints(self.model_runner.model, checkpoints, vllm_config=self.vllm_config, rank=self.rank)
        return times


def reload_checkpoints(model: Module, checkpoints: list[str], *, vllm_config: Any, rank: int) -> None:
    """One proven weight update for each, in order. checkpoints: folders, or models on the hub.  rank: for messages.

    Raises SyncError.
    """
    model_config = vllm_config.model_config
    device = torch.device(vllm_config.device_config.device)
    update = WeightUpdate(
        model,
        model_config=model_config,
        rank=rank,
        smoothing=smoothing_of(model_config),
        captured=device.type == "cuda" and not model_config.enforce_eager,
    )
    with set_current_vllm_config(vllm_config), device, torch.no_grad():
        for checkpoint in checkpoints:
            update.begin()
            for name, tensor in _weights(model, checkpoint, vllm_config=vllm_config):
                update.load([(name, tensor.to(device))])
            report = update.finish()
            LOGGER.info(
                "rank %d took %s: %d tensors in %.2f s, %d of %d layers proven",
                rank,
                checkpoint,
                report.tensors,
                report.seconds,
                report.layers_proven,
                report.layers,
            )


def _weights(model: Module, checkpoint: str, *, vllm_config: Any) -> Iterator[tuple[str, Tensor]]:
    """As vLLM's own loader reads them, whatever loader the engine was started with."""
    model_config = copy.copy(vllm_config.model_config)
    model_config.model, model_config.revision = checkpoint, None
    load_config = dataclasses.replace(vllm_config.load_config, load_format="auto", use_tqdm_on_load=False)
    return DefaultModelLoader(load_config).get_all_weights(model_config, model)

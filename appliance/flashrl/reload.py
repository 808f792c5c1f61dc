"""FLASHRL_TEST_RELOAD: a worker that takes other checkpoints when the engine has started, each as one weight update.

vLLM starts it by its name in `worker_cls`. It speaks as the last checkpoint.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn import Module
from vllm.config import set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from appliance.engine.update import SyncReport, WeightUpdate
from appliance.flashrl.log import LOGGER

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
        for checkpoint in self.vllm_config.additional_config[RELOAD_KEY]:
            report = load_checkpoint(
                self.model_runner.model, checkpoint, vllm_config=self.vllm_config, device=self.device
            )
            LOGGER.info(
                "rank %d re-loaded %s: %d tensors in %.2f s", self.rank, checkpoint, report.tensors, report.seconds
            )
        return times


def load_checkpoint(model: Module, checkpoint: str, *, vllm_config: Any, device: torch.device | None) -> SyncReport:
    """One weight update from a folder or a model on the hub. device: of the tensors, the CPU for None.

    Raises SyncError.
    """
    model_config = copy.copy(vllm_config.model_config)
    model_config.model, model_config.revision = checkpoint, None
    weights = DefaultModelLoader(LoadConfig(use_tqdm_on_load=False)).get_all_weights(model_config, model)
    update = WeightUpdate(model, model_config=vllm_config.model_config)
    on = device or torch.device("cpu")
    with set_current_vllm_config(vllm_config), on, torch.no_grad():
        update.begin()
        for name, tensor in weights:
            update.load([(name, tensor.to(on))])
        return update.finish()

"""Worker extensions that make the calls of other toolkits' extensions, in their order; vLLM mixes them into our worker.

Where theirs receives from a GPU (NCCL, CUDA IPC), these are handed the tensors. What they call of vLLM is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader import DefaultModelLoader, get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.utils import process_weights_after_loading

Tensors = list[tuple[str, Tensor]]


class OpenRLHFWorker:
    """openrlhf 0.11.2, trainer/ray/vllm_worker_wrap.py: one tensor a call, nothing says that it was the last."""

    def update_weight(self, name: str, weight: Tensor) -> None:
        self.model_runner.model.load_weights(weights=[(name, weight)])


@dataclass
class SkyRLInitInfo(WeightTransferInitInfo):
    packed: bool = True


@dataclass
class SkyRLUpdateInfo(WeightTransferUpdateInfo):
    weights: Tensors


class SkyRLTransfer(WeightTransferEngine[SkyRLInitInfo, SkyRLUpdateInfo]):
    """skyrl 0.4.0, skyrl_train/weight_sync/weight_receivers.py: `skyrl_nccl` and `skyrl_ipc` are vLLM's engines
    of weight transfer, with the worker's device as the default one. While they receive, a stand-in replaces the model:
    it has its own `load_weights`, which passes on what is no batched FP8 expert; everything else is the model's.
    """

    init_info_cls = SkyRLInitInfo
    update_info_cls = SkyRLUpdateInfo

    def init_transfer_engine(self, init_info: SkyRLInitInfo) -> None:
        assert init_info.packed

    def start_weight_update(self) -> None:
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SkyRLUpdateInfo) -> None:
        """Load views of one packed buffer, which is the sender's again afterwards."""
        chunk = update_info.weights
        packed = torch.cat([tensor.flatten() for _, tensor in chunk])
        parts = packed.split([tensor.numel() for _, tensor in chunk])
        views = [(name, part.view(tensor.shape)) for (name, tensor), part in zip(chunk, parts, strict=True)]
        model = self.model
        self.model = ModelWithAnotherLoader(model)
        try:
            with torch.device(self.device):
                self.model.load_weights(views)
        finally:
            self.model = model
        packed.fill_(float("nan"))

    def finish_weight_update(self) -> None:
        with torch.device(self.device):
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


class ModelWithAnotherLoader:
    """SkyRL's stand-in for a model while weights come."""

    def __init__(self, model: Module) -> None:
        self._model = model

    def load_weights(self, weights: Tensors) -> set[str]:
        return self._model.load_weights(weights=list(weights))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class SkyRLWorker:
    """skyrl 0.4.0, inference_servers/new_inference_worker_wrap.py: the extension registers SkyRL's engines of weight
    transfer before vLLM loads a model, and has no method that updates weights. The tests register it here."""


class PrimeRLWorker:
    """prime-rl 0.8.0, inference/vllm/worker/filesystem.py: a checkpoint's folder, in one layerwise reload whose
    functions it has imported before there was an engine."""

    def update_weights_from_path(self, weight_path: str) -> None:
        model = getattr(self.model_runner.model, "runnable", self.model_runner.model)  # behind CUDA graphs
        loader = get_model_loader(self.load_config)
        assert isinstance(loader, DefaultModelLoader)
        source = DefaultModelLoader.Source(weight_path, revision=None, prefix="", fall_back_to_pt=True)
        weights = loader._get_weights_iterator(source)
        with torch.device(next(model.parameters()).device), set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights(weights)
            finalize_layerwise_reload(model, self.model_runner.model_config)

    def update_weights_from_nixl(self) -> None:
        """inference/vllm/worker/nixl.py: the same bracket, and between its ends copies past load_weights."""
        model = self.model_runner.model
        with torch.device(self.device), set_current_vllm_config(self.vllm_config), torch.no_grad():
            initialize_layerwise_reload(model)
            for parameter in model.parameters():
                parameter.copy_(parameter.clone())
            finalize_layerwise_reload(model, self.model_runner.model_config)

    def load_weights_kernel(self, tensors: Tensors) -> None:
        """inference/vllm/worker/weight_transfer.py, by `quantize_in_weight_transfer`."""
        parameters = dict(self.model_runner.model.named_parameters())
        with torch.no_grad():
            for name, tensor in tensors:
                parameters[name].copy_(tensor)


class NeMoRLWorker:
    """NeMo-RL 0.8, models/generation/vllm/vllm_backend.py: buckets in a buffer that is used again, then vLLM's
    processing of the whole model; or all tensors in one `reload_weights`. What fails is `False`, and logged there."""

    def update_weights_via_ipc_zmq(self, buckets: list[Tensors]) -> bool:
        buffer = torch.empty(max(sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets), dtype=torch.uint8)
        try:
            for bucket in buckets:
                self.model_runner.model.load_weights(weights=list(_in_buffer(bucket, buffer)))
                buffer.fill_(0xFF)
            with set_current_vllm_config(self.model_runner.vllm_config):
                process_weights_after_loading(self.model_runner.model, self.model_config, self.device)
        except Exception:
            return False
        return True

    def update_weights_from_collective(self, buckets: list[Tensors]) -> bool:
        """With `refit_with_reload_api`."""
        buffer = torch.empty(max(sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets), dtype=torch.uint8)
        weights = (pair for bucket in buckets for pair in _in_buffer(bucket, buffer))
        try:
            self.model_runner.reload_weights(weights_iterator=weights)
        except Exception:  # as NeMo-RL does: it logs what failed, and answers that something did
            return False
        return True


def _in_buffer(bucket: Tensors, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    start = 0
    for name, tensor in bucket:
        view = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        start += tensor.nbytes
        yield name, view

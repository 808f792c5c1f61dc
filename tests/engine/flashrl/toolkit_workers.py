"""Worker extensions that make the calls of other toolkits' extensions, in their order; vLLM mixes them into our worker.

Where theirs receives from a GPU (NCCL, CUDA IPC), these are handed the tensors. What they call of vLLM is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.model_loader import DefaultModelLoader, get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise
from vllm.model_executor.model_loader.utils import process_weights_after_loading

Tensors = list[tuple[str, Tensor]]


class OpenRLHFWorker:
    """openrlhf 0.11.2, trainer/ray/vllm_worker_wrap.py: one tensor a call, nothing says that it was the last."""

    def update_weight(self, name: str, weight: Tensor) -> None:
        self.model_runner.model.load_weights(weights=[(name, weight)])


class SkyRLWorker:
    """skyrl 0.3.0, inference_servers/new_inference_worker_wrap.py: a layerwise reload around chunks, whose functions it
    looks up at each call."""

    def skyrl_start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        layerwise.get_numel_loaded = _capped(layerwise.get_numel_loaded)
        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            initialize_layerwise_reload(self.model_runner.model)

    def update_weights_ipc(self, chunk: Tensors) -> None:
        """Views of one packed buffer, which is the sender's again afterwards."""
        packed = torch.cat([tensor.flatten() for _, tensor in chunk])
        parts = packed.split([tensor.numel() for _, tensor in chunk])
        views = [(name, part.view(tensor.shape)) for (name, tensor), part in zip(chunk, parts, strict=True)]
        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            self.model_runner.model.load_weights(weights=views)
        packed.fill_(float("nan"))

    def update_weights_nccl(self, info: object) -> None:
        """As vLLM 0.23 has it, which SkyRL pins."""
        receiver = NCCLWeightTransferEngine.__new__(NCCLWeightTransferEngine)  # its own __init__ asks for a GPU
        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            receiver.receive_weights(info, load_weights=self.model_runner.model.load_weights)

    def skyrl_finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            finalize_layerwise_reload(self.model_runner.model, self.model_config)


def _capped(original: Callable[..., tuple[int, object]]) -> Callable[..., tuple[int, object]]:
    """SkyRL puts such a function in vLLM's place: a loader that copies twice counts once."""

    def count(loader: Callable[..., object], arguments: Any) -> tuple[int, object]:
        elements, result = original(loader, arguments)
        return min(elements, arguments.arguments["param"].numel()), result

    return count


class PrimeRLWorker:
    """prime-rl 0.8.0, inference/vllm/worker/filesystem.py: a checkpoint's folder, in one layerwise reload whose
    functions it has imported before there was an engine."""

    def update_weights_from_path(self, weight_path: str) -> None:
        model = self.model_runner.model
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
    """NeMo-RL 0.7.0, models/generation/vllm/vllm_backend.py: buckets in a buffer that is used again,
    then vLLM's processing of the whole model. What fails is `False`, and logged there."""

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


def _in_buffer(bucket: Tensors, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    start = 0
    for name, tensor in bucket:
        view = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        start += tensor.nbytes
        yield name, view

"""One weight update of a vLLM model: every tensor, or an error.

vLLM's layerwise reload is entered once per update and left once. In between, `load_weights` collects a layer's
tensors; when a layer is complete it is materialised, quantised and copied into the tensors that the kernels hold.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from appliance.errors import SyncError

Bucket = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class SyncReport:
    """What one update brought: numbers of tensors and bytes, and the seconds from first bucket to last layer."""

    tensors: int
    bytes: int
    seconds: float


class WeightUpdate:
    """Takes the buckets of one update: `begin`, any number of `load`, `finish`; an error at any point is final.

    After an error the model is half-updated and must not generate: `broken` says why, and a later `begin` raises.
    """

    def __init__(self, model: Module, *, model_config: object) -> None:
        self.model = model
        self.model_config = model_config
        self.broken = ""
        self._tensors = 0
        self._bytes = 0
        self._started = 0.0

    def begin(self) -> None:
        if self.broken:
            raise SyncError(f"weight update: the engine's weights are half-updated, an earlier update {self.broken}")
        self.broken = "did not finish"
        self._tensors = self._bytes = 0
        self._started = time.perf_counter()
        initialize_layerwise_reload(self.model)

    def load(self, bucket: Bucket) -> None:
        """bucket: (name, tensor) with the checkpoint's names. The tensors are kept until their layer is complete, so
        they must not share memory that the sender reuses. Raises SyncError for a value that is not finite."""
        for name, tensor in bucket:
            if not bool(torch.isfinite(tensor).all()):
                self.broken = f"brought values that are not finite in {name}"
                raise SyncError(f"weight update: {name} has a value that is not finite")
        self._tensors += len(bucket)
        self._bytes += sum(tensor.nbytes for _, tensor in bucket)
        self.model.load_weights(bucket)

    def finish(self) -> SyncReport:
        """Complete what waits for the end (attention, tied weights), after checking that nothing is missing.

        Raises SyncError.
        """
        tied = tied_layers(self.model)
        missing = incomplete_layers(self.model, tied=tied)
        if missing:
            shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
            self.broken = f"left {len(missing)} layers incomplete"
            raise SyncError(f"weight update: {len(missing)} layers did not receive all their weights: {shown}")
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in tied:
            _process_again(layer)
        self.broken = ""
        return SyncReport(tensors=self._tensors, bytes=self._bytes, seconds=time.perf_counter() - self._started)


def tied_layers(model: Module) -> list[Module]:
    """Layers of the running reload that wait for weights of their own and whose every parameter is one that a complete
    layer has: an `lm_head` tied to the embedding. No checkpoint brings tensors for them."""
    complete = {
        id(parameter)
        for layer in model.modules()
        if not get_layerwise_info(layer).can_load()
        for parameter in layer.parameters(recurse=False)
    }
    return [layer for layer in model.modules() if _is_tied(layer, complete=complete)]


def _is_tied(layer: Module, *, complete: set[int]) -> bool:
    info = get_layerwise_info(layer)
    if not info.can_load() or info.load_numel or info.kernel_tensors is None:
        return False
    parameters, _ = info.kernel_tensors
    return bool(parameters) and all(id(parameter) in complete for parameter in parameters.values())


def _process_again(layer: Module) -> None:
    """vLLM's CPU backend multiplies by a packed copy of lm_head's weight, made once after loading. A reload writes the
    new values into the shared tensor and leaves that copy as it was: rollouts would go on with the head of the first
    sync. Remove when: layerwise reload processes layers with tied weights."""
    method = getattr(layer, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        method.process_weights_after_loading(layer)


def incomplete_layers(model: Module, *, tied: list[Module]) -> list[str]:
    """Names of the layers that have parameters to load in the running reload and did not get all of them.

    vLLM itself fills such a layer from uninitialised memory (DEBUG line) or keeps its old weights (warning).
    """
    missing = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer) or any(layer is known for known in tied):
            continue
        wanted = sum(p.numel() for p in layer.parameters(recurse=False) if p is not None)
        if wanted and info.load_numel < wanted:
            missing.append(f"{name} ({info.load_numel} of {wanted} elements)")
    return missing

"""One weight update of a vLLM model: every tensor, or an error.

vLLM's layerwise reload is entered once per update and left once. In between, `load_weights` collects a layer's
tensors; when a layer is complete it is materialised, quantised and copied into the tensors that the kernels hold.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Module
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from appliance.engine.experts import pack_experts_anew
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

    def __init__(self, model: Module, *, model_config: Any) -> None:
        """model_config: vLLM's."""
        self.model = model
        self.model_config = model_config
        self.broken = ""
        self._names: set[str] = set()
        self._bytes = 0
        self._started = 0.0

    def begin(self) -> None:
        if self.broken:
            raise SyncError(f"weight update: the engine's weights are half-updated, an earlier update {self.broken}")
        self.broken = "did not finish"
        self._names.clear()
        self._bytes = 0
        self._started = time.perf_counter()
        pack_experts_anew(self.model)
        initialize_layerwise_reload(self.model)

    def load(self, bucket: Bucket) -> None:
        """bucket: (name, tensor) with the checkpoint's names. The tensors are kept until their layer is complete, so
        they must not share memory that the sender reuses. Raises SyncError for a tensor that the model does not have,
        has in another shape or has already got, and for a value that is not finite."""
        for name, tensor in bucket:
            if name in self._names:  # vLLM counts elements: twice the one half of a layer would pass for both halves
                self._fail(f"{name} came twice", f"brought {name} twice")
            if not bool(torch.isfinite(tensor).all()):
                self._fail(f"{name} has a value that is not finite", f"brought values that are not finite in {name}")
            if not self._give(name, tensor) and not self._is_tied_head(name):
                self._fail(f"{name} is not a weight of this model", f"brought {name}, which this model does not have")
            self._names.add(name)
            self._bytes += tensor.nbytes

    def _give(self, name: str, tensor: Tensor) -> set[str]:
        """One at a time: only what `load_weights` returns shows that vLLM did not skip a name (any `*.bias`)."""
        try:
            return self.model.load_weights([(name, tensor)])
        except (ValueError, AssertionError, RuntimeError, LookupError) as error:  # how vLLM's loaders refuse
            reason = textwrap.shorten(f"{type(error).__name__}: {error}", width=200, placeholder=" ...")
            self.broken = f"brought {name}, which vLLM refused"
            raise SyncError(f"weight update: vLLM refused {name} of shape {list(tensor.shape)}: {reason}") from error

    def _is_tied_head(self, name: str) -> bool:
        """The trainer's state has an lm_head even where it is the embedding; vLLM skips it."""
        return name == "lm_head.weight" and self.model_config.hf_text_config.tie_word_embeddings

    def _fail(self, message: str, broken: str) -> NoReturn:
        self.broken = broken
        raise SyncError(f"weight update: {message}")

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
        return SyncReport(tensors=len(self._names), bytes=self._bytes, seconds=time.perf_counter() - self._started)


def tied_layers(model: Module) -> list[Module]:
    """Layers of the running reload that wait for weights of their own and whose every parameter is one that a complete
    layer has: an `lm_head` tied to the embedding. No checkpoint brings tensors for them."""
    complete = {id(parameter) for layer in model.modules() for parameter in _complete_parameters(layer)}
    return [layer for layer in model.modules() if _is_tied(layer, complete=complete)]


def _complete_parameters(layer: Module) -> Iterable[Tensor]:
    info = get_layerwise_info(layer)
    if not info.can_load():
        return layer.parameters(recurse=False)
    if info.kernel_tensors is not None and 0 < info.load_numel >= loadable_elements(layer):
        return info.kernel_tensors[0].values()  # a padded vocabulary: vLLM processes it at the end
    return ()


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
        wanted = loadable_elements(layer)
        if wanted and info.load_numel < wanted:
            missing.append(f"{name} ({info.load_numel} of {wanted} elements)")
    return missing


def loadable_elements(layer: Module) -> int:
    """How many elements a checkpoint brings for a layer: vLLM pads a vocabulary to a multiple of 64 rows of zeros."""
    elements = sum(parameter.numel() for parameter in layer.parameters(recurse=False))
    if isinstance(layer, VocabParallelEmbedding):
        rows = layer.shard_indices
        padding = rows.num_elements_padded - rows.num_org_elements - rows.num_added_elements
        elements -= elements // rows.num_elements_padded * padding
    return elements

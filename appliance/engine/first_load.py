"""The first load of a vLLM model, compared with what the model needs, as every later update is (update.py).

vLLM itself counts a fused layer as loaded once one of its parts has come, and any layer with a quantisation method as
loaded without asking; what nobody wrote is memory as it was found. Here the elements are counted that each layer gets.
Of families that we know, and of models whose structure shows it (structure.py), each tensor is also held against the
place that it has in the model.

Each parameter's loader is called under the counter of vLLM's layerwise reload. That one itself counts too late: biases
that come before a layer's first weight pass it by.
"""

from __future__ import annotations

import dataclasses
import functools
import os.path
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from vllm.config import get_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import CopyCounter
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from appliance.engine.config import ApplianceConfig
from appliance.engine.structure import is_unlisted, require_fit
from appliance.engine.tensor_slots import Slot, slots
from appliance.engine.update import is_derived, loadable_elements, predicts_more
from appliance.engine.ways_in import ways_into
from appliance.errors import WeightsError
from appliance.quant.codec import all_finite
from appliance.quant.headers import MISTRALS
from appliance.record.events import report_failures
from appliance.terms.counts import counted
from appliance.terms.families import packed_parts
from appliance.terms.settings import LOAD_FORMAT

_EXPERT = re.compile(r"(?P<layer>.+)\.(?P<number>\d+)\.(?P<part>gate|up|down)_proj\.weight")  # in a checkpoint
_MOST_NAMED = 4
_HINT = "the checkpoint is not the model of its config.json: copy or download it again"


@contextmanager
def checked_first_load(model: Module, *, model_config: Any, needs_places: bool = False) -> Iterator[None]:
    """Check the first load of a model: the one call of its `load_weights` while this is open. Raises WeightsError for a
    checkpoint that is not the model's. The error is written as an event of the run here, since whoever started the
    engine gets no error from its processes. A draft model is not checked, as it has layers of another model's, and
    neither is a later update, which is proven.

    model_config: vLLM's.  needs_places: refuse a model whose structure does not show where each tensor belongs, as
    engines that quantise do (EngineError).
    """
    config = get_current_vllm_config()
    if model_config is not config.model_config or ways_into(model):
        yield
        return
    needs_places |= isinstance(config.quant_config, ApplianceConfig)
    with report_failures():
        if needs_places:
            require_fit(model, vllm_config=config)
    first = FirstLoad(model, model_config=model_config, needs_places=needs_places)
    load = model.load_weights

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> Any:
        with first.counting():
            loaded = load(first.checked(weights))
        first.require_whole(loaded)
        return loaded

    model.__dict__["load_weights"] = load_weights
    try:
        with report_failures():
            yield
    finally:
        del model.__dict__["load_weights"]


@register_model_loader(LOAD_FORMAT)
class WholeLoader(DefaultModelLoader):
    """vLLM's own loader for checkpoints on disk, with the check of the first load; a plan's engines are started with
    it. It reads transformers' files and no others: Mistral's `consolidated*.safetensors` beside them hold all weights
    once more."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(dataclasses.replace(load_config, load_format="hf"))

    def _prepare_weights(self, model_name_or_path: str, *arguments: Any, **settings: Any) -> tuple[Any, ...]:
        """Return vLLM's answer with fewer files: the folder, the files, and more, which differs between versions."""
        folder, files, *more = super()._prepare_weights(model_name_or_path, *arguments, **settings)
        others = [file for file in files if not os.path.basename(file).startswith(MISTRALS)]
        if not others:
            raise WeightsError(
                f"first load: {folder} has weights in Mistral's own format alone",
                hint="save the model with transformers: a plan's engines read its files",
            )
        return folder, others, *more

    def load_weights(self, model: Module, model_config: Any) -> None:
        with checked_first_load(model, model_config=model_config, needs_places=True):
            super().load_weights(model, model_config)


class FirstLoad:
    """Counter of the elements that each layer of a model gets."""

    def __init__(self, model: Module, *, model_config: Any, needs_places: bool) -> None:
        """model_config: vLLM's.  needs_places: as in checked_first_load, which has looked at the structure."""
        self._model, self._config = model, model_config.hf_text_config
        self._layers = dict(model.named_modules())
        self._is_known = needs_places or not is_unlisted(model_config)
        tied = bool(self._config.tie_word_embeddings)
        places_of = slots(model, tied_head=tied) if self._is_known else {}
        there = {name: tuple(filter(self._is_there, places)) for name, places in places_of.items()}
        self._slots = {name: places for name, places in there.items() if places}
        self._experts = {layer.layer_name: layer for layer in model.modules() if isinstance(layer, RoutedExperts)}
        self._counted: Counter[str] = Counter()
        self._online = {name for name, layer in self._layers.items() if get_layerwise_info(layer).can_load()}
        self._came: set[str] = set()

    def _is_there(self, place: Slot) -> bool:
        """Say whether the layer has this parameter: a bias may be missing. GEMMs of experts are no modules, and have no
        bias."""
        layer = self._layers.get(place.layer)
        return place.parameter == "weight" if layer is None else getattr(layer, place.parameter, None) is not None

    def checked(self, weights: Iterable[tuple[str, Tensor]]) -> Generator[tuple[str, Tensor], None, None]:
        """Yield the same tensors. Raises WeightsError for one that is not the model's."""
        for name, tensor in weights:
            usual_name = self._rename(name, tensor)
            if usual_name in self._came:
                raise WeightsError(f"first load: {name} is in two of the checkpoint's files", hint=_HINT)
            self._came.add(usual_name)
            if self._is_known:
                self._require_place(usual_name, tensor)
            yield name, tensor

    def _rename(self, name: str, tensor: Tensor) -> str:
        """Return the name that transformers gives this tensor. vLLM's class of Mistral's models also loads Mistral's
        own files, and renames what they have. Raises WeightsError for queries or keys that are of no head of the model:
        the class also sorts their rows, which here is done to a tensor without memory."""
        rename = getattr(self._model, "maybe_remap_mistral", None)
        if rename is None:
            return name
        try:
            return str(rename(name, torch.empty(tensor.shape, device="meta"))[0])
        except RuntimeError as error:
            fact = f"{name} has the shape {list(tensor.shape)}, which does not fit the model's heads"
            raise WeightsError(f"first load: {fact}", hint=_HINT) from error

    def _require_place(self, name: str, tensor: Tensor) -> None:
        """Check the name, shape and values of a tensor of a model whose places are known."""
        shapes = {place.shape for place in self._slots.get(name, ())} or {*self._shape_in_experts(name)}
        if wrong := next((shape for shape in shapes if shape and shape != tensor.shape), None):
            fact = f"{name} has the shape {list(tensor.shape)}, the model has {list(wrong)}"
            raise WeightsError(f"first load: {fact}", hint=_HINT)
        if not (shapes or packed_parts(name)[1] or self._is_left_out(name)):
            raise WeightsError(f"first load: {name} is not a weight of this model", hint=_HINT)
        if shapes and not _holds_floats(tensor):
            raise WeightsError(f"first load: {name} is {tensor.dtype}, not floats", hint=_HINT)
        if shapes and not all_finite(tensor):
            raise WeightsError(f"first load: {name} has a value that is not finite", hint=_HINT)

    def _shape_in_experts(self, name: str) -> Iterator[tuple[int, int]]:
        """Yield [N, K] of an expert's tensor by this name; none where there is no such expert."""
        match = _EXPERT.fullmatch(name)
        layer = self._experts.get(match["layer"]) if match else None
        if match and layer is not None and int(match["number"]) < layer.moe_config.num_experts:
            width = layer.moe_config.moe_parallel_config.tp_size * layer.intermediate_size_per_partition
            yield (layer.hidden_size, width) if match["part"] == "down" else (width, layer.hidden_size)

    def _is_left_out(self, name: str) -> bool:
        is_tied = name == "lm_head.weight" and self._config.tie_word_embeddings
        return is_tied or is_derived(name) or predicts_more(name, config=self._config)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count, while this is open, what each parameter's loader writes into its layer."""
        put: list[tuple[Tensor, Callable[..., Any] | None, Callable[..., Any]]] = []
        for name, layer in self._layers.items():
            for key, parameter in layer.named_parameters(recurse=False):
                own_loader = getattr(parameter, "weight_loader", None)
                loader = own_loader or default_weight_loader
                parameter.weight_loader = counting = self._counted_loader(loader, name, key)
                put.append((parameter, own_loader, counting))
        try:
            yield
        finally:
            for parameter, own_loader, counting in reversed(put):  # a parameter of two layers has two
                if getattr(parameter, "weight_loader", None) is not counting:
                    continue  # vLLM has taken it off, with its own, as the layer was complete
                if own_loader is None:
                    del parameter.weight_loader
                else:
                    parameter.weight_loader = own_loader

    def _counted_loader(self, loader: Callable[..., Any], name: str, key: str) -> Callable[..., Any]:
        @functools.wraps(loader)  # by their name vLLM knows the loaders that it has put around others
        def counted_loader(*args: Any, **kwargs: Any) -> Any:
            parameter, tensor, *_ = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
            if _holds_floats(parameter) and not _holds_floats(tensor):
                raise WeightsError(f"first load: {name}.{key} got {tensor.dtype}, not floats", hint=_HINT)
            with CopyCounter() as counter:
                given = loader(*args, **kwargs)
            self._counted[name] += min(counter.copied_numel, parameter.numel())
            return given

        return counted_loader

    def require_whole(self, loaded: set[str] | None) -> None:
        """Check that the layers got all of their elements. loaded: names of the model's own parameters, as its class
        returns them. Raises WeightsError for layers that did not."""
        missing = []
        for name, layer in self._layers.items():
            is_complete = name in self._online and not get_layerwise_info(layer).can_load()  # and quantised by now
            num_needed = 0 if is_complete or is_deferred_attention_layer(layer) else loadable_elements(layer)
            has = self._counted[name]
            if has < num_needed and not self._has_come_otherwise(name, layer, loaded=loaded or set()):
                missing.append(f"{name} ({has} of {num_needed} elements{self._not_come(name)})")
        if missing:
            shown = ", ".join(missing[:_MOST_NAMED])
            more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
            layers = counted(
                len(missing),
                "layer did not receive all its weights",
                plural="layers did not receive all their weights",
            )
            raise WeightsError(f"first load: {layers}: {shown}{more}", hint=_HINT)

    def _not_come(self, layer: str) -> str:
        """Return the first tensor that the layer waits for; of a model of another family it is not known."""
        places = (
            (name, held) for name, held in self._slots.items() if not name.startswith(f"{layer}.") or len(held) == 1
        )
        waits = [
            name for name, held in places if any(place.layer == layer for place in held) and name not in self._came
        ]
        return f", no {waits[0]}" if waits else ""

    def _has_come_otherwise(self, name: str, layer: Module, *, loaded: set[str]) -> bool:
        """Tell whether the tensor has come in another way. A tied head is another layer's tensor; and some classes
        write into a layer without its loader, and say so."""
        parameters = dict(layer.named_parameters(recurse=False))
        counted = (held for other, held in self._layers.items() if other != name and self._counted[other])
        others = {id(parameter) for held in counted for parameter in held.parameters(recurse=False)}
        is_tied = {id(parameter) for parameter in parameters.values()} <= others
        return is_tied or (not self._counted[name] and {f"{name}.{key}" for key in parameters} <= loaded)


def _holds_floats(tensor: Tensor) -> bool:
    """Tell whether it has floats of 16 bits or more: FP8 codes mean nothing without their scales."""
    return tensor.is_floating_point() and tensor.itemsize > 1

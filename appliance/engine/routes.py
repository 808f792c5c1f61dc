"""Which loader of a layer takes a tensor: vLLM finds it at the first update, and from then on it is called at once.

A model's `load_weights` looks for a tensor's place from the top of the model, and vLLM's layerwise reload runs the
loader on meta tensors to count what it will copy: some hundred Python calls for each tensor of each update, which for
small layers take as long as packing. What they find does not change. It stays vLLM's word, as before, and the proof has
its own mapping to hold it against (tensor_slots.py). And as the count is known, a tensor goes to its place in the
layer when it comes: vLLM keeps it, in memory that its sender may use again, until the layer is complete.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Size, Tensor
from torch.nn import Module
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _layerwise_process,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer

_COUNTS = "online_process_loader"  # by its name vLLM, too, knows the loader that it has put around a layer's own

_Tell = Callable[[Tensor, "_Route | None"], None]


@dataclass(frozen=True)
class _Route:
    """A call of `weight_loader(parameter, tensor, *part, **named)`, as vLLM makes it, of a layer that waits."""

    layer: Module
    parameter: str
    """Name of the parameter in the layer."""
    shape: Size
    call: inspect.BoundArguments
    """Arguments of the layer's own loader, without tensors."""
    place: str
    """Name of the tensor among its arguments."""
    elements: int
    """Number of elements that the loader copies."""

    def leads(self, tensor: Tensor) -> bool:
        return tensor.shape == self.shape and get_layerwise_info(self.layer).can_load()

    def give(self, tensor: Tensor) -> None:
        """Give the tensor to the layer as vLLM does it when a layer is complete, and with its last tensor the rest of
        that."""
        info = get_layerwise_info(self.layer)
        if (parameter := getattr(self.layer, self.parameter)).is_meta:
            materialize_layer(self.layer, info)
            parameter = getattr(self.layer, self.parameter)
        given = {**self.call.arguments, "param": parameter, self.place: tensor}
        call = inspect.BoundArguments(self.call.signature, given)
        _get_original_loader(parameter)(*call.args, **call.kwargs)
        info.load_numel += self.elements
        assert info.load_numel_total is not None, "the layer waits: see `leads`"
        if info.load_numel >= info.load_numel_total:
            _layerwise_process(self.layer, info)


class Routes:
    """Routes of one model, by the names of its checkpoint's tensors."""

    def __init__(self, model: Module, *, records: bool) -> None:
        """records: of a model whose `load_weights` is known to do nothing but find places; others are called always."""
        self._model, self._records = model, records
        self._known: dict[str, _Route] = {}

    def give(self, name: str, tensor: Tensor, *, layers: Sequence[Module]) -> bool:
        """Give a tensor to vLLM. Returns False where vLLM skipped it. layers: those that have a part of it.

        Remembered is a tensor that one loader got as it is. What vLLM skips, changes, cuts or gives to several goes by
        the model at each update, and so do experts, whose GEMMs have no loader.  Raises what vLLM's loaders raise.
        """
        if (route := self._known.get(name)) is not None and route.leads(tensor):
            route.give(tensor)
            return True
        loads: list[tuple[Tensor, _Route | None]] = []
        with _overheard(layers if self._records else (), tell=lambda *call: loads.append(call)):
            taken = type(self._model).load_weights(self._model, [(name, tensor)])  # past engine/ways_in.py
        if taken and len(loads) == 1 and loads[0][0] is tensor and (shown := loads[0][1]) is not None:
            self._known.setdefault(name, shown)
        return bool(taken)


@contextmanager
def _overheard(layers: Sequence[Module], *, tell: _Tell) -> Iterator[None]:
    """Report each call of a loader of these layers, and make it."""
    found = [(layer, key, held) for layer in layers for key, held in layer.named_parameters(recurse=False)]
    put: list[tuple[Tensor, Callable[..., Any], Callable[..., Any]]] = []
    for layer, key, parameter in found:
        if (loader := getattr(parameter, "weight_loader", None)) is not None:
            parameter.weight_loader = telling = _telling(loader, layer=layer, key=key, tell=tell)
            put.append((parameter, loader, telling))
    try:
        yield
    finally:
        for parameter, loader, telling in reversed(put):  # a parameter of two layers has two
            if parameter.weight_loader is telling:  # else vLLM has taken it off, with its own, as the layer is complete
                parameter.weight_loader = loader


def _telling(loader: Callable[..., Any], *, layer: Module, key: str, tell: _Tell) -> Callable[..., Any]:
    @functools.wraps(loader)  # by their name vLLM knows the loaders that it has put around others
    def telling_loader(parameter: Tensor, tensor: Tensor, *part: Any, **options: Any) -> Any:
        info = get_layerwise_info(layer)
        before, total = info.load_numel, info.load_numel_total or 0
        loaded = loader(parameter, tensor, *part, **options)
        elements = (info.load_numel if info.can_load() else total) - before
        route: _Route | None = None
        own = getattr(loader, "__wrapped__", None) if loader.__name__ == _COUNTS else None
        if own is not None and own.__name__ != _COUNTS and not is_deferred_attention_layer(layer):  # not of two layers
            call = inspect.signature(own).bind(parameter, tensor, *part, **options)
            call.apply_defaults()
            if place := next((each for each, value in call.arguments.items() if value is tensor), ""):
                call.arguments |= dict.fromkeys(("param", place))  # the first is vLLM's to fill in
                route = _Route(layer, key, tensor.shape, call, place, elements)
        tell(tensor, route)
        return loaded

    return telling_loader

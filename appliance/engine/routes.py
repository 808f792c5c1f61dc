"""Which loader of a layer takes a tensor: vLLM finds it at the first update, and from then on it is called straight.

A model's `load_weights` looks for a tensor's place from the top of the model, in some hundred Python calls for each
tensor of each update: for small layers they take as long as packing. What it finds does not change. It stays vLLM's
word, as before, and the proof has a mapping of its own to hold it against (tensor_slots.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module


@dataclass(frozen=True)
class _Call:
    """Of `weight_loader(parameter, tensor, *part, **named)`, as vLLM makes it."""

    layer: Module
    parameter: str
    """Its name in the layer."""
    tensor: Tensor
    part: tuple[Any, ...]
    named: dict[str, Any]


class Routes:
    """Of one model, by the names of its checkpoint's tensors."""

    def __init__(self, model: Module, *, records: bool) -> None:
        """records: of a model whose `load_weights` is known to do nothing but find places; others are asked always."""
        self._model, self._records = model, records
        self._known: dict[str, Callable[[Tensor], object]] = {}

    def give(self, name: str, tensor: Tensor, *, layers: Sequence[Module]) -> bool:
        """Whether vLLM took the tensor, or skipped it. layers: those that have a part of it.

        Remembered is a tensor that one loader got as it is. What vLLM skips, changes, cuts or gives to several goes by
        the model at each update, and so do experts, whose GEMMs have no loader.  Raises what vLLM's loaders raise.
        """
        if (route := self._known.get(name)) is not None:
            route(tensor)
            return True
        calls: list[_Call] = []
        with _overheard(layers if self._records else (), tell=calls.append):
            taken = type(self._model).load_weights(self._model, [(name, tensor)])  # past engine/ways_in.py
        if taken and len(calls) == 1 and calls[0].tensor is tensor:
            self._known[name] = _route(calls[0])
        return bool(taken)


def _route(call: _Call) -> Callable[[Tensor], object]:
    layer, key, part, named = call.layer, call.parameter, call.part, call.named  # without the tensor

    def route(tensor: Tensor) -> object:
        parameter = getattr(layer, key)  # a reload's own one, until the layer is complete
        return parameter.weight_loader(parameter, tensor, *part, **named)

    return route


@contextmanager
def _overheard(layers: Sequence[Module], *, tell: Callable[[_Call], None]) -> Iterator[None]:
    """Each call of a loader of these layers is told, and goes through."""
    found = [(layer, key, held) for layer in layers for key, held in layer.named_parameters(recurse=False)]
    put: list[tuple[Tensor, Callable[..., Any], Callable[..., Any]]] = []
    for layer, key, held in found:
        if (loader := getattr(held, "weight_loader", None)) is not None:
            held.weight_loader = telling = _telling(loader, layer=layer, key=key, tell=tell)
            put.append((held, loader, telling))
    try:
        yield
    finally:
        for held, loader, telling in reversed(put):  # a parameter of two layers has two
            if held.weight_loader is telling:  # else vLLM has taken it off, with its own, as the layer is complete
                held.weight_loader = loader


def _telling(
    loader: Callable[..., Any], *, layer: Module, key: str, tell: Callable[[_Call], None]
) -> Callable[..., Any]:
    @functools.wraps(loader)  # by their name vLLM knows the loaders that it has put around others
    def telling_loader(parameter: Tensor, tensor: Tensor, *part: Any, **named: Any) -> Any:
        tell(_Call(layer, key, tensor, part, named))
        return loader(parameter, tensor, *part, **named)

    return telling_loader

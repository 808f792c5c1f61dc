"""A tensor's way to its layer is remembered only where the model handed the very tensor to one loader."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from appliance.engine.routes import Routes

NAME = "one.weight"


class Model(Module):
    """places: what its `load_weights` does with a tensor, by layers and their loaders."""

    def __init__(self, places: Callable[[Model, Tensor], set[str] | None]) -> None:
        super().__init__()
        self.one, self.other, self.num_loads, self.loads = Linear(2, 2, bias=False), Linear(2, 2, bias=False), 0, []
        self._places = places
        for name, layer in self.named_children():
            layer.weight.weight_loader = self.loader(name)

    def loader(self, name: str) -> Callable[..., None]:
        def load(param: Tensor, loaded: Tensor, part: str | None = None) -> None:
            self.loads.append((name, param.is_meta, loaded, part))
            param.data[: len(loaded)].copy_(loaded)

        return load

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> set[str] | None:
        self.num_loads += 1
        [(_, tensor)] = weights
        return self._places(self, tensor)


def place(layer: Module, tensor: Tensor, *part: str) -> set[str]:
    layer.weight.weight_loader(layer.weight, tensor, *part)
    return {NAME}


def update(model: Model, routes: Routes, tensor: Tensor, *, is_whole: bool = False) -> bool:
    """By vLLM's own reload. is_whole: the tensor completes its layer, which vLLM need not do at the end."""
    initialize_layerwise_reload(model)
    taken = routes.give(NAME, tensor, layers=[model.one, model.other])
    assert not (is_whole and get_layerwise_info(model.one).can_load())
    with torch.no_grad():
        finalize_layerwise_reload(model, None)
    return taken


def routes_of(model: Model, *, times: int) -> list[bool]:
    routes = Routes(model, records=True)
    record_metadata_for_reloading(model)
    loaders = [layer.weight.weight_loader for layer in model.children()]
    answers = [update(model, routes, torch.ones(2, 2)) for _ in range(times)]
    assert [layer.weight.weight_loader for layer in model.children()] == loaders
    return answers


@torch.no_grad()
def test_the_model_is_asked_once_and_the_loader_gets_the_part_each_time() -> None:
    model = Model(lambda model, tensor: place(model.one, tensor, "k"))
    routes, weight = Routes(model, records=True), model.one.weight
    record_metadata_for_reloading(model)
    for number in range(1, 4):
        tensor = torch.full((2, 2), float(number))
        assert update(model, routes, tensor, is_whole=True)
        name, is_counting, loaded, part = model.loads[-1]
        assert (name, is_counting, part) == ("one", False, "k") and loaded is tensor
        assert model.one.weight is weight and torch.equal(weight, tensor)
    assert model.num_loads == 1
    assert [is_counting for _, is_counting, *_ in model.loads] == [True, False, False, False]  # by vLLM, once


@torch.no_grad()
def test_a_tensors_memory_is_its_senders_again_before_its_layer_is_complete() -> None:
    def by_shape(model: Model, tensor: Tensor) -> set[str]:
        parameter = model.one.weight if tensor.ndim == 2 else model.one.bias
        parameter.weight_loader(parameter, tensor)
        return {"taken"}

    model = Model(by_shape)
    model.one.bias = Parameter(torch.zeros(2))
    model.one.bias.weight_loader = model.loader("one")
    routes, info = Routes(model, records=True), get_layerwise_info(model.one)
    record_metadata_for_reloading(model)
    for number in (1.0, 2.0):
        initialize_layerwise_reload(model)
        weight, bias = torch.full((2, 2), number), torch.full((2,), number)
        assert routes.give(NAME, weight, layers=[model.one]) and info.can_load()
        if model.num_loads == 2:
            assert info.loaded_weights == [] and info.load_numel == 4
            weight.zero_()
        assert routes.give("one.bias", bias, layers=[model.one]) and not info.can_load()
        finalize_layerwise_reload(model, None)
        assert [set(each.flatten().tolist()) for each in model.one.parameters()] == [{number}, {number}]
    assert model.num_loads == 2


@torch.no_grad()
def test_what_a_route_does_not_fit_goes_by_the_model() -> None:
    """A tensor of another shape, and one for a layer that is complete."""
    model = Model(lambda model, tensor: place(model.one, tensor))
    routes = Routes(model, records=True)
    record_metadata_for_reloading(model)
    for tensor, asked in ((torch.ones(2, 2), 1), (torch.ones(1, 2), 2), (torch.ones(2, 2), 2)):
        update(model, routes, tensor)
        assert model.num_loads == asked
    routes.give(NAME, torch.ones(2, 2), layers=[model.one])
    assert model.num_loads == 3


@pytest.mark.parametrize(
    "places",
    [
        lambda model, tensor: place(model.one, tensor + 1),
        lambda model, tensor: place(model.one, tensor[:1]) | place(model.one, tensor[1:]),
        lambda model, tensor: place(model.one, tensor) | place(model.other, tensor),
        lambda model, tensor: set(),
        lambda model, tensor: None,
        lambda model, tensor: place(model.one, tensor) - {NAME},
    ],
    ids=["changed", "cut", "given to two", "skipped", "says nothing", "loaded and not said"],
)
def test_what_the_model_does_more_with_it_does_at_each_update(places: Callable[..., set[str] | None]) -> None:
    model = Model(places)
    with torch.no_grad():
        routes_of(model, times=3)
    assert model.num_loads == 3 and len(model.loads) % 3 == 0


@torch.no_grad()
def test_a_loader_that_names_no_argument_for_the_tensor_is_found_anew_each_time() -> None:
    model = Model(lambda model, tensor: place(model.one, tensor))
    model.one.weight.weight_loader = lambda param, *loaded: param.data.copy_(*loaded)
    assert routes_of(model, times=2) == [True, True] and model.num_loads == 2
    assert torch.equal(model.one.weight, torch.ones(2, 2))


def test_a_loader_that_the_model_takes_off_stays_off() -> None:
    """As vLLM does with what it has put around a loader, when the layer is complete."""

    def complete(model: Model, tensor: Tensor) -> set[str]:
        names = place(model.one, tensor)
        model.one.weight.weight_loader = plain
        return names

    model = Model(complete)
    plain = model.loader("plain")
    Routes(model, records=True).give(NAME, torch.ones(2, 2), layers=[model.one])
    assert model.one.weight.weight_loader is plain


def test_a_parameter_of_two_layers_has_its_loader_back() -> None:
    model = Model(lambda model, tensor: place(model.one, tensor))
    model.other.weight = model.one.weight
    with torch.no_grad():
        routes_of(model, times=1)


def test_an_error_of_a_loader_leaves_the_loaders_and_no_route() -> None:
    def refuse(model: Model, tensor: Tensor) -> set[str]:
        place(model.one, tensor)
        raise ValueError("refused")

    model = Model(refuse)
    routes, loader = Routes(model, records=True), model.one.weight.weight_loader
    for number in (1, 2):
        with pytest.raises(ValueError, match="refused"):
            routes.give(NAME, torch.ones(2, 2), layers=[model.one])
        assert (model.num_loads, model.one.weight.weight_loader) == (number, loader)


def test_a_model_that_may_do_more_is_asked_always() -> None:
    """Such as one that works on its tensors once they are loaded."""
    model = Model(lambda model, tensor: place(model.one, tensor))
    routes = Routes(model, records=False)
    for asked in (1, 2):
        assert routes.give(NAME, torch.ones(2, 2), layers=[model.one])
        assert model.num_loads == asked == len(model.loads)

"""A tensor's way to its layer is remembered only where the model handed the very tensor to one loader."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module

from appliance.engine.routes import Routes

NAME = "one.weight"


class Model(Module):
    """places: what its `load_weights` does with a tensor, by layers and their loaders."""

    def __init__(self, places: Callable[[Model, Tensor], set[str] | None]) -> None:
        super().__init__()
        self.one, self.other, self.asked, self.got = Linear(2, 2), Linear(2, 2), 0, []
        self._places = places
        for name, layer in self.named_children():
            layer.weight.weight_loader = self.loader(name)

    def loader(self, name: str) -> Callable[..., None]:
        def load(parameter: Tensor, tensor: Tensor, part: str | None = None) -> None:
            self.got.append((name, parameter, tensor, part))

        return load

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> set[str] | None:
        self.asked += 1
        [(_, tensor)] = weights
        return self._places(self, tensor)


def place(layer: Module, tensor: Tensor, *part: str) -> set[str]:
    layer.weight.weight_loader(layer.weight, tensor, *part)
    return {NAME}


def given(model: Model, *, times: int) -> tuple[Tensor, list[bool]]:
    tensor, routes = torch.ones(2, 2), Routes(model, records=True)
    loaders = [layer.weight.weight_loader for layer in model.children()]
    answers = [routes.give(NAME, tensor, layers=[model.one, model.other]) for _ in range(times)]
    assert [layer.weight.weight_loader for layer in model.children()] == loaders
    return tensor, answers


def test_the_model_is_asked_once_and_the_loader_gets_the_part_each_time() -> None:
    model = Model(lambda model, tensor: place(model.one, tensor, "k"))
    tensor, answers = given(model, times=3)
    assert (model.asked, answers) == (1, [True] * 3)
    for name, parameter, loaded, part in model.got:
        assert (name, part) == ("one", "k") and parameter is model.one.weight and loaded is tensor
    assert len(model.got) == 3


def test_a_layers_new_parameter_is_the_one_that_is_loaded() -> None:
    """As at each reload."""
    model = Model(lambda model, tensor: place(model.one, tensor))
    routes, tensor = Routes(model, records=True), torch.ones(2, 2)
    routes.give(NAME, tensor, layers=[model.one])
    model.one.weight = torch.nn.Parameter(torch.zeros(2, 2))
    model.one.weight.weight_loader = model.loader("new")
    routes.give(NAME, tensor, layers=[model.one])
    assert [(name, parameter is model.one.weight) for name, parameter, *_ in model.got] == [
        ("one", False),
        ("new", True),
    ]


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
    given(model, times=3)
    assert model.asked == 3 and len(model.got) % 3 == 0


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
    given(model, times=1)


def test_an_error_of_a_loader_leaves_the_loaders_and_no_route() -> None:
    def refuse(model: Model, tensor: Tensor) -> set[str]:
        place(model.one, tensor)
        raise ValueError("refused")

    model = Model(refuse)
    routes, loader = Routes(model, records=True), model.one.weight.weight_loader
    for asked in (1, 2):
        with pytest.raises(ValueError, match="refused"):
            routes.give(NAME, torch.ones(2, 2), layers=[model.one])
        assert (model.asked, model.one.weight.weight_loader) == (asked, loader)


def test_a_model_that_may_do_more_is_asked_always() -> None:
    """Such as one that works on its tensors once they are loaded."""
    model = Model(lambda model, tensor: place(model.one, tensor))
    routes = Routes(model, records=False)
    for asked in (1, 2):
        assert routes.give(NAME, torch.ones(2, 2), layers=[model.one])
        assert model.asked == asked == len(model.got)

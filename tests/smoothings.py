"""Smoothing of every kind that a model's family has, with random scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from appliance.quant.layer_units import FoundUnits, find_units
from appliance.quant.profile import Smoothing, SmoothingGroup
from appliance.terms.families import DOWN, FAMILIES, GATE_UP, VALUES, Unit, names_of_parts


def layer_calls(model: nn.Module, *, tokens: int = 12) -> list[tuple[Tensor, dict[str, Any]]]:
    """Input and keywords of each decoder layer in a forward of the model. tokens: of the sequence."""
    calls: list[tuple[Tensor, dict[str, Any]]] = []

    def note(_: nn.Module, arguments: tuple[Tensor, ...], keywords: dict[str, Any]) -> None:
        calls.append((arguments[0].clone(), keywords))

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in model.model.layers]
    with torch.no_grad():
        model((torch.arange(tokens) * 37 % model.config.vocab_size)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return calls


def found_units(model: nn.Module, index: int) -> FoundUnits:
    """The units of a decoder layer, found by trying."""
    hidden_BTH, call = layer_calls(model)[index]
    return find_units(model.model.layers[index], hidden_BTH=hidden_BTH, call=call)


def _units(model: nn.Module, index: int) -> tuple[Unit, ...]:
    family = FAMILIES.get(type(model).__name__)
    names = [name for name, _ in model.model.layers[index].named_parameters()]
    return family.units(names) if family else found_units(model, index).units


def random_smoothing(model: nn.Module, *, seed: int, largest: int = 4, kinds: str = "norm through") -> Smoothing:
    """A group for each norm and each linear layer that a unit of the family is smoothed through, with scales between
    2^-largest and 2^largest.

    model: of transformers; without a row in the list its units are found by trying.  kinds: `norm`, `through` or both.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters, config = dict(model.named_parameters()), model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    groups: dict[str, SmoothingGroup] = {}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for unit in _units(model, layer):
            source = unit.norm * ("norm" in kinds) or unit.through * ("through" in kinds)
            if not source:
                continue
            members = [prefix + name + (name not in (GATE_UP, DOWN)) * ".weight" for name in unit.members]
            readers = [part for name in members for part in names_of_parts(name)]
            readers += [f"{prefix}{name}.weight" for name in unit.followers]
            heads = source == VALUES
            readers_of_head = config.num_attention_heads // config.num_key_value_heads if heads else 1
            channels = parameters[members[0]].shape[-1] // readers_of_head
            exponent_K = torch.randint(-largest, largest + 1, (channels,), generator=generator)
            name = f"{prefix}{source}.weight"
            if name in groups:  # a norm in front of two blocks
                readers, exponent_K = [*groups[name].linears, *readers], groups[name].scale_K.log2()
            groups[name] = SmoothingGroup(
                source=name,
                linears=tuple(readers),
                scale_K=torch.exp2(exponent_K.float()),
                head_dim=head_dim if heads else 0,
                readers_of_head=readers_of_head,
            )
    return Smoothing(tuple(groups.values()))

"""Smoothing of every kind that a model's family has, with random scales."""

from __future__ import annotations

import torch
from torch import nn

from appliance.quant.profile import Smoothing, SmoothingGroup
from appliance.terms.families import DOWN, FAMILIES, GATE_UP, VALUES


def random_smoothing(model: nn.Module, *, seed: int, largest: int = 4, kinds: str = "norm through") -> Smoothing:
    """A group for each norm and each linear layer that a unit of the family is smoothed through, with scales between
    2^-largest and 2^largest.

    model: of transformers.  kinds: `norm`, `through` or both.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters, config = dict(model.named_parameters()), model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    groups = []
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        here = [name.removeprefix(prefix) for name in parameters if name.startswith(prefix)]
        for unit in FAMILIES[type(model).__name__].units(here):
            source = unit.norm * ("norm" in kinds) or unit.through * ("through" in kinds)
            if not source:
                continue
            readers = (*unit.members, *unit.followers)
            channels = len(parameters[f"{prefix}{source}.weight"])
            exponent_K = torch.randint(-largest, largest + 1, (channels,), generator=generator)
            heads = source == VALUES
            groups.append(
                SmoothingGroup(
                    source=f"{prefix}{source}.weight",
                    linears=tuple(prefix + name + (name not in (GATE_UP, DOWN)) * ".weight" for name in readers),
                    scale_K=torch.exp2(exponent_K.float()),
                    head_dim=head_dim if heads else 0,
                    readers_of_head=config.num_attention_heads // config.num_key_value_heads if heads else 1,
                )
            )
    return Smoothing(tuple(groups))

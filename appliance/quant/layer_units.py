"""The units of a decoder layer of any family, found by trying them on the layer itself, as transformers computes it.

A family of the list names its units (terms/families.py). In any other layer, which linear layers belong together is
read off their names, and what may be smoothed is measured. Smoothing divides what a source gives, channel by channel,
and multiplies what all of its readers get (quant/profile.py). So a short sequence goes through the layer, with each
source divided in turn by random factors:

1. A norm's output must be divided by exactly these factors when its weight and its bias are. That of a norm which
   multiplies by 1 + w is not.
2. Readers of a source are the linear layers whose inputs are then divided by the same factors.
3. When the inputs of all readers are multiplied by the factors again, the layer must give the output that it gave
   before. It does not where something else reads the source, too, or where its values have a bound: the output of a
   linear layer is also tried with one factor so small, and one so large, that every value would be beyond it.

All factors are powers of two, so every product and sum of the layer keeps its bits but for the exponent (as long as no
value leaves the format's exponents), and each comparison is exact: there is no tolerance.

Legend: B sequences of T tokens, H the width of the residual stream, K channels of a source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from appliance.quant.profile import MAX_EXPONENT, SmoothingGroup
from appliance.terms.families import FUSED_LAYERS, VALUES, Unit

_EXPONENTS = (-3, -2, -1, 1, 2, 3)  # of the factors: no channel keeps its value
_SEED = 0

ADDS_TO_WEIGHT = "the output is not in proportion to the stored weight, as of a norm that multiplies by 1 + w"
FEEDS_NO_LINEAR = "no linear layer reads the output as it is"
READ_ELSEWHERE = "not only linear layers read the output"
OTHER_NAME = "the name does not end in `norm`, by which a profile knows one"
NOT_PASSED_ON = "no linear layer of the same block, and nothing else, reads the output channel by channel"


@dataclass(frozen=True)
class FoundUnits:
    """Units of a decoder layer, and what cannot be smoothed in it."""

    units: tuple[Unit, ...]
    """Units in the order in which the layer computes them."""
    not_smoothed: dict[str, str] = field(default_factory=dict)
    """Reasons by which norms, and linear layers that others are smoothed through elsewhere, are not smoothed here, by
    their names in the layer."""


def find_units(layer: nn.Module, *, hidden_BTH: Tensor, call: Mapping[str, Any]) -> FoundUnits:
    """Find the units of a decoder layer of transformers.

    layer: with its weights, which are as they were afterwards.  hidden_BTH, call: input and keywords of one call of it.
    """
    trial = _Trial(layer, hidden_BTH=hidden_BTH, call=call)
    units = trial.plain_units()
    not_smoothed: dict[str, str] = {}
    for name in trial.norms:
        readers, why = trial.readers_of_norm(name)
        read = [unit for unit in units if readers & set(unit.members)]
        if split := next((unit for unit in read if not readers.issuperset(unit.members)), None):
            why = f"a part of {split.fused} reads the output, and the rest does not"
        if why:
            not_smoothed[name] = why
        else:
            units = [dataclasses.replace(unit, norm=name) if unit in read else unit for unit in units]
    for source, linear in trial.channel_sources():
        reader = next((unit for unit in units if not unit.norm and trial.passes_on(source, linear, unit=unit)), None)
        if reader is None:
            not_smoothed[source] = NOT_PASSED_ON
        else:
            units[units.index(reader)] = dataclasses.replace(reader, through=source)
    return FoundUnits(tuple(units), not_smoothed)


@dataclass
class _Run:
    """One forward of the layer."""

    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    """Inputs of the linear layers, of each call, by their names in the order of their first calls."""
    norm_outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    """Outputs of the norms, of each call."""
    output: Tensor = field(default_factory=lambda: torch.empty(0))
    """Output of the layer, [B, T, H]."""


class _Trial:
    """A decoder layer with one input, run again with a source divided."""

    def __init__(self, layer: nn.Module, *, hidden_BTH: Tensor, call: Mapping[str, Any]) -> None:
        self._layer = layer
        self._hidden_BTH = hidden_BTH
        self._call = dict(call)
        self._generator = torch.Generator().manual_seed(_SEED)
        modules = [(name, module) for name, module in layer.named_modules() if name]
        self.linears = {name: module for name, module in modules if isinstance(module, nn.Linear)}
        self.norms = {name: module for name, module in modules if _is_norm(module)}
        self._plain = self._run()

    def plain_units(self) -> list[Unit]:
        """Return the layer's units without norms and sources. Those that an engine fuses belong together: as several
        linear layers, or as one that holds all parts."""
        units: dict[str, Unit] = {}
        computed = [name for name in self._plain.inputs if name in self.linears]
        for name in dict.fromkeys([*computed, *self.linears]):
            parent, _, leaf = name.rpartition(".")
            prefix = f"{parent}." if parent else ""
            fused = next((key for key, parts in FUSED_LAYERS.items() if leaf in (key, *parts)), "")
            parts = tuple(prefix + part for part in FUSED_LAYERS.get(fused, ()))
            if leaf in FUSED_LAYERS:
                units[name] = Unit((name,), fused=name, ignored_as=parts)
            elif fused and all(part in self.linears for part in parts):
                units[prefix + fused] = Unit(parts, fused=prefix + fused)
            else:
                units[name] = Unit((name,))
        return list(units.values())

    def readers_of_norm(self, name: str) -> tuple[set[str], str]:
        """Return the linear layers that read a norm, and why it cannot be smoothed, or an empty text."""
        norm = self.norms[name]
        if name not in self._plain.norm_outputs:
            return set(), FEEDS_NO_LINEAR
        scale_K = self._factors(len(norm.weight))
        with _divided(norm, scale_K):
            divided = self._run()
            if not _are_divided(divided.norm_outputs[name], by_K=scale_K, plain=self._plain.norm_outputs[name]):
                return set(), ADDS_TO_WEIGHT
            readers = self._readers(divided, scale_K=scale_K)
            if not readers:
                return set(), FEEDS_NO_LINEAR
            if not name.endswith("norm"):
                return set(), OTHER_NAME
            restored = self._run(times=dict.fromkeys(readers, scale_K))
        return readers, "" if torch.equal(restored.output, self._plain.output) else READ_ELSEWHERE

    def channel_sources(self) -> Iterator[tuple[str, str]]:
        """Yield (name of a linear layer that others may be smoothed through, name of the module that has its rows):
        the last part of a fused layer, by itself or as the last rows."""
        for fused, parts in FUSED_LAYERS.items():
            for name in self.linears:
                parent, _, leaf = name.rpartition(".")
                if leaf in (fused, parts[-1]):
                    yield f"{parent}.{parts[-1]}" if parent else parts[-1], name

    def passes_on(self, source: str, linear: str, *, unit: Unit) -> bool:
        """Return whether a unit of the same block reads the source channel by channel, and nothing else reads it.
        linear: the module that has the source's rows last."""
        (reader, *others), rows = unit.members, self.linears[linear].out_features
        if others or reader == linear or reader.rpartition(".")[0] != linear.rpartition(".")[0]:
            return False
        head_dim, readers_of_head = 0, 1
        if source == VALUES:
            attention = self._layer.get_submodule(VALUES.rpartition(".")[0])
            head_dim = getattr(attention, "head_dim", 0)
            readers_of_head = getattr(attention, "num_key_value_groups", 0)
        channels = self.linears[reader].in_features // max(1, readers_of_head)
        has_heads = source != VALUES or (head_dim and readers_of_head and channels % head_dim == 0)
        if not has_heads or channels > rows or (source == linear and channels != rows):
            return False
        far_K = torch.full((channels,), 2.0**MAX_EXPONENT)  # shows a bound of the layer, such as OLMo's `clip_qkv`
        return all(
            self._passes(scale_K, source=source, linear=linear, reader=reader, heads=(head_dim, readers_of_head))
            for scale_K in (self._factors(channels), far_K, 1 / far_K)
        )

    def _passes(self, scale_K: Tensor, *, source: str, linear: str, reader: str, heads: tuple[int, int]) -> bool:
        """Return whether the layer's output stays the same when the source is divided by these factors and its reader's
        input multiplied. heads: channels of a head of values, and readers of one; (0, 1) of other sources."""
        group = SmoothingGroup(f"{source}.weight", (), scale_K, head_dim=heads[0], readers_of_head=heads[1])
        channels = len(scale_K)

        def divide(output: Tensor) -> Tensor:
            first = output.shape[-1] - channels
            return torch.cat([output[..., :first], output[..., first:] / scale_K.to(output)], dim=-1)

        restored = self._run(linear=linear, divide=divide, times={reader: group.reader_scale_K})
        return torch.equal(restored.output, self._plain.output)

    def _factors(self, channels: int) -> Tensor:
        """[channels] float32, powers of two."""
        places = torch.randint(len(_EXPONENTS), (channels,), generator=self._generator)
        return torch.exp2(torch.tensor(_EXPONENTS, dtype=torch.float32)[places])

    def _readers(self, divided: _Run, *, scale_K: Tensor) -> set[str]:
        """Linear layers whose inputs are divided, of a run with a divided source."""
        return {
            name
            for name, inputs in divided.inputs.items()
            if _are_divided(inputs, by_K=scale_K, plain=self._plain.inputs[name])
        }

    @torch.no_grad()
    def _run(
        self,
        *,
        linear: str = "",
        divide: Callable[[Tensor], Tensor] = lambda output: output,
        times: Mapping[str, Tensor] | None = None,
    ) -> _Run:
        """Run the layer. linear: the linear layer whose output `divide` changes.  times: factors of the inputs of
        linear layers."""
        run = _Run()
        with ExitStack() as stack:
            for name, module in self.linears.items():
                hook = _input_hook(run, name, scale_K=(times or {}).get(name))
                stack.callback(module.register_forward_pre_hook(hook).remove)
            for name, module in self.norms.items():
                stack.callback(module.register_forward_hook(_output_hook(run, name)).remove)
            if linear:
                hook = self.linears[linear].register_forward_hook(lambda _, __, output: divide(output))
                stack.callback(hook.remove)
            run.output = self._layer(self._hidden_BTH, **self._call)
        return run


def _is_norm(module: nn.Module) -> bool:
    """Whether a module has no more than a weight that is a vector and a bias of the same size, and no layers."""
    sizes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    weight = sizes.get("weight", ())
    return len(weight) == 1 and all(name in ("weight", "bias") and sizes[name] == weight for name in sizes)


def _are_divided(tensors: list[Tensor], *, by_K: Tensor, plain: list[Tensor]) -> bool:
    """Whether each tensor is what it was without a divided source, divided by the factors. Zeros show nothing."""
    return any(bool(values.any()) for values in plain) and all(
        before.shape[-1] == len(by_K) and torch.equal(after, before / by_K.to(before))
        for after, before in zip(tensors, plain, strict=True)
    )


@contextmanager
def _divided(norm: nn.Module, scale_K: Tensor) -> Iterator[None]:
    """Divide what a norm stores, as smoothing does, while the block lasts."""
    stored = dict(norm.named_parameters(recurse=False))
    for name, parameter in stored.items():
        norm._parameters[name] = nn.Parameter(parameter / scale_K.to(parameter), requires_grad=False)
    try:
        yield
    finally:
        norm._parameters.update(stored)


def _input_hook(run: _Run, name: str, *, scale_K: Tensor | None) -> Callable[..., Any]:
    def note(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (x,) = arguments
        run.inputs.setdefault(name, []).append(x.clone())
        return (x if scale_K is None else x * scale_K.to(x),)

    return note


def _output_hook(run: _Run, name: str) -> Callable[..., None]:
    def note(_: nn.Module, __: Any, output: Tensor) -> None:
        run.norm_outputs.setdefault(name, []).append(output.clone())

    return note

"""A decoder layer as the engine's layers: which linears are fused, which norm feeds them, what quantising costs.

Every GEMM of the layer goes through one function of this module, which multiplies exactly, exactly with measuring, or
quantised by the codec. Experts, which transformers stores as two fused tensors, are multiplied one by one.

Legend: M tokens, N output and K input channels, E experts, I width of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from appliance.quant.checkpoint import Ledger, StreamedModel, place_parameter
from appliance.quant.codec import QuantisedWeight, dequantise, quantise, quantise_tokens
from appliance.quant.prediction import TokenBatch
from appliance.quant.profile import Smoothing, SmoothingGroup, fold
from appliance.terms.families import DOWN, EXPERTS, GATE_UP, VALUES, Unit, names_of_parts
from appliance.terms.schemes import Scales, Scheme

_MEASURED_TOKENS = 256  # of a GEMM's input in a batch: a mean over tokens and channels needs no more


@dataclass(frozen=True)
class _Part:
    """Some rows of a quantised weight."""

    quantised: QuantisedWeight
    rows: slice

    def dequantised(self) -> Tensor:
        """[rows, K] float32."""
        return dequantise(self.quantised)[self.rows]


@dataclass
class Errors:
    """Sums of squared errors over tokens and channels, float64, by a unit's first member."""

    of_output: dict[str, float] = field(default_factory=dict)
    output: dict[str, float] = field(default_factory=dict)

    def add(self, unit: Unit, *, exact_MN: Tensor, quantised_MN: Tensor) -> None:
        key = unit.members[0]
        difference = (quantised_MN - exact_MN).double().square().sum()
        self.of_output[key] = self.of_output.get(key, 0.0) + float(difference)
        self.output[key] = self.output.get(key, 0.0) + float(exact_MN.double().square().sum())

    def relative(self, unit: Unit) -> float:
        """Return |y' - y| / |y|; 0 where there was no token, or only zeros."""
        norm = self.output.get(unit.members[0], 0.0)
        return (self.of_output[unit.members[0]] / norm) ** 0.5 if norm else 0.0


class LayerView:
    """A decoder layer with its weights in place."""

    prefix: str
    """Beginning of its parameters' names, such as `model.layers.3.`."""

    def __init__(
        self,
        layer: nn.Module,
        *,
        units: tuple[Unit, ...],
        prefix: str,
        scheme: Scheme,
        ignore: tuple[str, ...],
        ledger: Ledger,
        calls: list[dict[str, Any]],
        valid: list[Tensor],
        active_experts: float = 1.0,
    ) -> None:
        """units: of this layer.  calls: keywords that the layer is called with, of each batch.  valid: [B, T] bool of
        each batch, false on padding.  active_experts: the share of a layer's experts that multiply a token."""
        self.layer = layer
        self.prefix = prefix
        self.scheme = scheme
        self._ledger = ledger
        self._active_experts = active_experts
        self._calls = calls
        self._valid = valid
        self._valid_BT = valid[0]  # of the batch that runs now
        self.units = units
        self._unit_of = {member: unit for unit in self.units for member in unit.members}
        self.ignored = frozenset(
            unit.members[0]
            for unit in self.units
            if all(is_ignored(prefix + name, ignore) for name in unit.layer)
            or (unit.fused and prefix + unit.fused in ignore)  # vLLM has its parts matched by patterns, not itself
        )

    def weights(self, unit: Unit) -> list[Tensor]:
        """Return the unit's matrices [N, K], one for each expert where it has experts."""
        if unit.members[0] in (GATE_UP, DOWN):
            return list(self.layer.get_parameter(unit.members[0]).unbind())
        return [self.layer.get_submodule(member).weight for member in unit.members]

    def multiplications(self, unit: Unit) -> int:
        """Count the multiplications of one token by the unit's matrices."""
        active = self._active_experts if unit.members[0] in (GATE_UP, DOWN) else 1.0
        return round(active * sum(weight_NK.numel() for weight_NK in self.weights(unit)))

    def fold(self, group: SmoothingGroup) -> None:
        """Fold a group of this layer into its weights, one tensor at a time."""
        smoothing = Smoothing((group,))
        for name, parameter in list(self.layer.named_parameters()):
            folded = fold(self.prefix + name, parameter, smoothing=smoothing)
            if folded is not parameter:
                place_parameter(self.layer, name, self._ledger.enter(nn.Parameter(folded, requires_grad=False)))

    def readers_of_head(self, unit: Unit) -> int:
        """Query heads whose values one head of the unit's source has; 1 where the source has no heads."""
        return self.layer.self_attn.num_key_value_groups if unit.through == VALUES else 1

    def together(self) -> list[tuple[Unit, ...]]:
        """Return the units in their order, those that read one norm together: of a block with attention and MLP side by
        side the first units of both."""
        units_by_norm: dict[str, list[Unit]] = {}
        for unit in self.units:
            units_by_norm.setdefault(unit.norm or unit.members[0], []).append(unit)
        return [tuple(units) for units in units_by_norm.values()]

    def group(self, units: tuple[Unit, ...], *, scale_K: Tensor) -> SmoothingGroup:
        """Make the smoothing group of units that read one source: the source, the units, and what else reads it."""
        unit, members = units[0], [member for unit in units for member in unit.members]
        names = [part for name in members for part in names_of_parts(name if name == GATE_UP else f"{name}.weight")]
        names += [f"{follower}.weight" for unit in units for follower in unit.followers]
        return SmoothingGroup(
            source=f"{self.prefix}{unit.norm or unit.through}.weight",
            linears=tuple(self.prefix + name for name in names),
            scale_K=scale_K,
            head_dim=self.layer.self_attn.head_dim if unit.through == VALUES else 0,
            readers_of_head=self.readers_of_head(unit),
        )

    def of_source(self, unit: Unit, range_K: Tensor) -> Tensor:
        """Return the largest value of each channel of the unit's source. range_K: of the unit's input, where query
        heads that read one head lie side by side."""
        readers = self.readers_of_head(unit)
        if readers == 1:
            return range_K
        return range_K.view(-1, readers, self.layer.self_attn.head_dim).amax(dim=1).flatten()

    def weight_error(self, unit: Unit) -> float:
        """Return |W' - W| / |W|, Frobenius, over all matrices of the unit."""
        difference = norm = 0.0
        for weight_NK, part in zip(self.weights(unit), self._codes(unit), strict=True):
            difference += float((part.dequantised() - weight_NK.float()).double().square().sum())
            norm += float(weight_NK.double().square().sum())
        return (difference / norm) ** 0.5 if norm else 0.0

    def unit_of(self, member: str) -> Unit:
        return self._unit_of[member]

    def all_codes(self, in_bf16: frozenset[str] = frozenset()) -> dict[str, list[_Part]]:
        """Return the codes of each quantised unit, by its first member. in_bf16: first members of units that stay in
        BF16, beside the ignored."""
        return {
            unit.members[0]: self._codes(unit) for unit in self.units if unit.members[0] not in self.ignored | in_bf16
        }

    def _codes(self, unit: Unit) -> list[_Part]:
        """Quantised as the engine does: members whose rows share scales are quantised as one fused weight."""
        weights = self.weights(unit)
        if len(unit.members) == 1 or self.scheme.spec.scales is Scales.CHANNEL:
            return [_Part(self._quantised(weight), slice(None)) for weight in weights]
        fused, parts, end = self._quantised(torch.cat(weights)), [], 0
        for weight in weights:
            parts.append(_Part(fused, slice(end, end := end + len(weight))))
        return parts

    def _quantised(self, weight_NK: Tensor) -> QuantisedWeight:
        made = quantise(weight_NK, scheme=self.scheme)
        self._ledger.enter(made.codes_NK)
        return made

    @torch.no_grad()
    def exact(
        self, batches: list[Tensor], *, errors: Errors, ranges: dict[str, Tensor]
    ) -> tuple[list[Tensor], Samples]:
        """Run the layer exactly. Returns its outputs for batches [B, T, H], and tokens at the inputs of units that can
        be smoothed.

        errors: gets what quantising each unit alone costs, on some tokens of each batch.  ranges: gets [K] float32, the
        largest |x| of all tokens at each unit's input, by its first member.
        """
        codes = self.all_codes()
        samples: Samples = []

        def multiply(
            member: str, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, index: int, sequence_M: Tensor
        ) -> Tensor:
            unit = self._unit_of[member]
            key = unit.members[0]
            x_MK = x[self._valid_BT] if x.ndim == 3 else x  # experts get no padding
            if x_MK.shape[0]:
                absmax_K = x_MK.abs().amax(dim=0).float()
                ranges[key] = torch.maximum(ranges[key], absmax_K) if key in ranges else absmax_K
            if x_MK.shape[0] and key in codes:
                some_MK = x_MK[:: -(-x_MK.shape[0] // _MEASURED_TOKENS)].clone()
                self._measure(unit, some_MK, weight_NK, codes[key][index], errors=errors)
                if unit.norm or unit.through:
                    samples.append((member, index, some_MK))
            return functional.linear(x, weight_NK, bias_N)

        return self.run(batches, multiply=multiply), samples

    def smoothed(self, unit: Unit, *, group: SmoothingGroup, samples: Samples) -> Errors:
        """Measure the unit's error on the samples when its group has been folded into the weights."""
        errors, codes, weights = Errors(), self._codes(unit), self.weights(unit)
        for member, index, some_MK in samples:
            if self._unit_of[member] == unit:
                reached_MK = some_MK * group.reader_scale_K.reciprocal().to(some_MK.dtype)  # as the source now gives it
                self._measure(unit, reached_MK, weights[index], codes[index], errors=errors)
        return errors

    def _measure(self, unit: Unit, x_MK: Tensor, weight_NK: Tensor, part: _Part, *, errors: Errors) -> None:
        exact_MN = functional.linear(x_MK.float(), weight_NK.float())
        errors.add(unit, exact_MN=exact_MN, quantised_MN=self.product(x_MK, part))

    @torch.no_grad()
    def quantised(self, batches: list[Tensor], *, in_bf16: frozenset[str]) -> list[Tensor]:
        """Run the layer with all units quantised but those of `in_bf16` (first members) and the ignored, and return
        its outputs."""
        codes = self.all_codes(in_bf16)

        def multiply(
            member: str, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, index: int, sequence_M: Tensor
        ) -> Tensor:
            key = self._unit_of[member].members[0]
            if key not in codes or not x.numel():
                return functional.linear(x, weight_NK, bias_N)
            product = self.product(x.reshape(-1, x.shape[-1]), codes[key][index])
            product = product if bias_N is None else product + bias_N.float()
            return product.to(x.dtype).view(*x.shape[:-1], -1)

        return self.run(batches, multiply=multiply)

    def product(self, x_MK: Tensor, part: _Part, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Multiply weights and activations by the codec, to [M, N]. dtype: of both when they are multiplied: float32 is
        exact to its rounding, bfloat16 several times faster and off by less than quantising is."""
        tokens_MK = dequantise(quantise_tokens(x_MK, scheme=self.scheme))
        return functional.linear(tokens_MK.to(dtype), part.dequantised().to(dtype))

    def run(self, batches: list[Tensor], *, multiply: Multiply, first: int = 0) -> list[Tensor]:
        """Run the layer with every GEMM of a unit done by `multiply`, and return its outputs. first: the number of the
        first batch, where they are not all."""
        changed = set()
        for unit in self.units:
            for index, member in enumerate(unit.members):
                module = self.layer.get_submodule(EXPERTS if member in (GATE_UP, DOWN) else member)
                if member == GATE_UP:
                    module.forward = _experts_forward(module, multiply=multiply, valid=lambda: self._valid_BT)
                elif member != DOWN:
                    module.forward = _linear_forward(module, member=member, index=index, multiply=multiply)
                changed.add(module)
        outputs = []
        try:
            for number, hidden_BTH in enumerate(batches, start=first):
                self._valid_BT = self._valid[number]
                outputs.append(self.layer(hidden_BTH, **self._calls[number]))
        finally:
            for module in changed:
                del module.forward
        return outputs


Multiply = Callable[[str, Tensor, Tensor, Tensor | None, int, Tensor], Tensor]
"""member, inputs [..., K], weight [N, K], bias [N] or None, number of the matrix in its unit, sequence of each row
of the inputs -> outputs [..., N]."""
Samples = list[tuple[str, int, Tensor]]  # member, number of its matrix, [M, K] inputs


def is_ignored(name: str, ignore: tuple[str, ...]) -> bool:
    """Return whether a name is ignored, by compressed-tensors' rule: an exact name, or `re:` and a pattern that matches
    from the start."""
    return any(re.match(each[3:], name) if each.startswith("re:") else each == name for each in ignore)


def _linear_forward(linear: nn.Module, *, member: str, index: int, multiply: Multiply) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        """x: [B, T, K]."""
        sequence_M = torch.arange(len(x)).repeat_interleave(x.shape[1])
        return multiply(member, x, linear.weight, linear.bias, index, sequence_M)

    return forward


def _experts_forward(
    experts: nn.Module, *, multiply: Multiply, valid: Callable[[], Tensor]
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def forward(hidden_MK: Tensor, chosen_MS: Tensor, weights_MS: Tensor) -> Tensor:
        """chosen_MS: int64, the S experts of each token.  weights_MS: their shares."""
        valid_M = valid().flatten()
        total_MK = torch.zeros_like(hidden_MK)
        for expert in chosen_MS.unique().tolist():
            token, slot = torch.where((chosen_MS == expert) & valid_M[:, None])
            sequence = token // valid().shape[1]
            gate_up = multiply(GATE_UP, hidden_MK[token], experts.gate_up_proj[expert], None, expert, sequence)
            gate, up = gate_up.chunk(2, dim=-1)
            down = multiply(DOWN, experts.act_fn(gate) * up, experts.down_proj[expert], None, expert, sequence)
            total_MK.index_add_(0, token, (down * weights_MS[token, slot, None]).to(total_MK.dtype))
        return total_MK

    return forward


class Views:
    """Decoder layers of a model, one after the other, for the passes of a calibration."""

    embedded: list[Tensor]
    """Inputs of the first decoder layer of each batch, [B, T, H] BF16."""
    groups: tuple[SmoothingGroup, ...]
    """Smoothing that `open` folds in, none at first."""

    def __init__(
        self,
        model: StreamedModel,
        *,
        batches: Sequence[TokenBatch],
        scheme: Scheme,
        ignore: tuple[str, ...],
        ledger: Ledger,
        on_layer: Callable[[str, int, int], None] = lambda name, done, total: None,
    ) -> None:
        """on_layer: called after every layer of every pass, so that a run can tell a slow pass from none at all; with
        the name of the pass, the layers done in it, and their number."""
        self.model = model
        self.batches = batches
        calls = [model.layer_calls(model.embed(batch.tokens_BT)) for batch in batches]
        self.embedded = [hidden_BTH for hidden_BTH, _ in calls]
        self.groups = ()
        self._calls = [keywords for _, keywords in calls]
        self._scheme = scheme
        self._ignore = ignore
        self._ledger = ledger
        self._on_layer = on_layer

    @contextmanager
    def open(self, index: int, *, pass_name: str, is_back: bool = False) -> Iterator[LayerView]:
        """Load a decoder layer's weights while the block lasts, and yield its view. is_back: whether the pass begins at
        the last layer."""
        with self.model.layer(index) as layer:
            view = LayerView(
                layer,
                units=self.model.units(index, layer),
                prefix=f"model.layers.{index}.",
                scheme=self._scheme,
                ignore=self._ignore,
                ledger=self._ledger,
                calls=[calls[index] for calls in self._calls],
                valid=[batch.valid_BT for batch in self.batches],
                active_experts=self.model.active_experts,
            )
            for group in self.groups:
                if group.linears[0].startswith(view.prefix):
                    view.fold(group)
            yield view
            del view, layer
        total = self.model.num_layers
        self._on_layer(pass_name, total - index if is_back else index + 1, total)

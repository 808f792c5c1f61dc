"""Calibration: what quantising a model's layers costs on given text, and the smoothing that makes it cost less.

One decoder layer is in memory at a time. Two streams of activations go through it: the exact one, and the one that a
quantised engine would have. For each layer:

1. The exact stream gives the largest |x| of every input channel, and, on a sample of tokens, the error that quantising
   each GEMM alone makes.
2. SmoothQuant's rule gives factors from the activations' ranges and those of all quantised weights that read them, of
   query heads that share a head of values the largest. For INT8, what a norm feeds gets better ones from the same
   sample of tokens (`quant/smoothing_factors.py`).
3. The same measurement on the same tokens with the scales folded in. A group that does not lower the error of the layer
   that reads it is dropped; where better factors were found, for the rule's.
4. The quantised stream passes through the quantised layer.

At the end both streams go through the head: the mismatch to expect (`quant/prediction.py`). Where that is above a
budget, the layers that stay in BF16 are chosen by what each contributes to it (`quant/mismatch_budget.py`).

Legend: B sequences of T tokens, K input channels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from appliance.quant.checkpoint import Ledger, ModelTensors, StreamedModel
from appliance.quant.layer_view import Errors, LayerView, Samples, Views
from appliance.quant.mismatch_budget import MismatchBudget
from appliance.quant.prediction import batches_of
from appliance.quant.profile import (
    LayerError,
    Memory,
    Origin,
    Profile,
    Settings,
    Smoothing,
    SmoothingGroup,
)
from appliance.quant.smoothing_factors import by_rule, refine
from appliance.terms.families import GATE_UP, Unit
from appliance.terms.schemes import Scheme


@dataclass
class _Streams:
    """Activations of all batches between two layers; the same tensors until a layer is quantised."""

    exact: list[Tensor]
    quantised: list[Tensor]


def calibrate(
    folder: Path,
    *,
    sequences: Sequence[Sequence[int]],
    scheme: Scheme,
    settings: Settings,
    origin: Origin,
    prompt_tokens: Sequence[int] = (),
    trust_remote_code: bool = False,
    on_layer: Callable[[str, int, int], None] = lambda name, done, total: None,
    ledger: Ledger | None = None,
) -> Profile:
    """Profile the model in `folder` on tokenised text, on the CPU.

    sequences: token ids, each of at least one token.  prompt_tokens: of each sequence, how many no response has; empty:
    the mismatch of all but the first counts.  trust_remote_code: whether code that comes with the model may run.
    on_layer: called after every layer of every pass over the text, as `Views` has it.
    Raises EngineError for a model in which there is no path from embeddings through decoder layers to a head, or a
    checkpoint that is not whole, NumericsError when a weight or an activation is not finite.
    """
    ledger = ledger or Ledger()
    checkpoint = ModelTensors(folder, ledger=ledger)
    model = StreamedModel(checkpoint, trust_remote_code=trust_remote_code)
    batches = batches_of(sequences, prompt_tokens=prompt_tokens)
    views = Views(model, batches=batches, scheme=scheme, ignore=settings.ignore, ledger=ledger, on_layer=on_layer)
    streams = _Streams(views.embedded, list(views.embedded))
    layers: list[LayerError] = []
    groups: list[SmoothingGroup] = []
    activations: dict[str, Tensor] = {}
    exact = [streams.exact]
    for index in range(model.num_layers):
        with views.open(index, pass_name="layer") as view:
            layers_here, groups_here, activations_here = _one_layer(view, streams, settings=settings)
            del view
        layers += layers_here
        groups += groups_here
        activations |= activations_here
        exact.append(streams.exact)
    views.groups = tuple(groups)
    mismatch = MismatchBudget(views, exact=exact, settings=settings)
    predicted = mismatch.predict(streams.quantised)
    layers, chosen = mismatch.choose(layers, all_quantised=predicted)
    return Profile(
        origin=origin,
        scheme=scheme,
        settings=settings,
        smoothing=Smoothing(tuple(groups)),
        layers=tuple(layers),
        architecture=model.architecture,
        not_smoothed=model.not_smoothed if settings.strength > 0 else (),
        predicted=chosen,
        predicted_all=predicted if chosen is not predicted else None,
        memory=Memory(
            peak_bytes=ledger.peak_bytes,
            largest_layer_bytes=model.largest_layer_bytes,
            model_bytes=sum(2 * math.prod(checkpoint.shape(name)) for name in checkpoint.names),
        ),
        activations=activations,
    )


def _one_layer(
    view: LayerView, streams: _Streams, *, settings: Settings
) -> tuple[list[LayerError], list[SmoothingGroup], dict[str, Tensor]]:
    """Compute what the layer adds to the profile, and pass the streams through it."""
    plain, ranges = Errors(), dict[str, Tensor]()
    outputs, samples = view.exact(streams.exact, errors=plain, ranges=ranges)
    groups = _groups(view, ranges=ranges, samples=samples, strength=settings.strength)
    errors = {unit.members[0]: plain.relative(unit) for unit in view.units if unit.members[0] not in view.ignored}
    kept_groups, weight_errors = [], {}
    for units in view.together():
        quantised = [unit for unit in units if unit.members[0] in errors]
        for group in groups.get(units, ()):
            view.fold(group)
            smoothed = [view.smoothed(unit, group=group, samples=samples).relative(unit) for unit in quantised]
            if sum(smoothed) < sum(map(plain.relative, quantised)):
                errors |= {unit.members[0]: error for unit, error in zip(quantised, smoothed, strict=True)}
                kept_groups.append(group)
                break
            view.fold(dataclasses.replace(group, scale_K=group.scale_K.reciprocal()))  # exactly back
        # A unit comes before those that are smoothed through it: its errors are those of rows as they were.
        weight_errors |= {unit: view.weight_error(unit) for unit in units}
    streams.quantised = view.quantised(streams.quantised, in_bf16=frozenset())
    streams.exact = outputs
    layers = [
        LayerError(
            layer=tuple(view.prefix + name for name in unit.layer),
            linears=tuple(view.prefix + member for member in unit.members),
            weight_error=weight_errors[unit],
            output_error=errors[unit.members[0]],
            output_error_plain=plain.relative(unit),
            stays_in_bf16=False,
            multiplications=view.multiplications(unit),
        )
        for unit in view.units
        if unit.members[0] in errors
    ]
    names = {unit.members[0]: unit.members for unit in view.units}
    activations = {view.prefix + member: value for key, value in ranges.items() for member in names[key]}
    return layers, kept_groups, activations


def _groups(
    view: LayerView, *, ranges: dict[str, Tensor], samples: Samples, strength: float
) -> dict[tuple[Unit, ...], list[SmoothingGroup]]:
    """Make the groups to try, the best guess first, for the units that read one source, where some are quantised and
    it can be divided. Scales that are all 1 are none."""
    groups = {}
    for units in view.together():
        quantised = [unit for unit in units if unit.members[0] not in view.ignored and unit.members[0] in ranges]
        can_smooth = bool(units[0].norm or units[0].through) and strength > 0
        if not can_smooth or not quantised:
            continue
        unit, weights = quantised[0], [weight_NK for unit in quantised for weight_NK in view.weights(unit)]
        key = unit.members[0]
        weight_K = torch.stack([weight.abs().amax(dim=0) for weight in weights]).amax(dim=0).float()
        activation_K, weight_K = (view.of_source(unit, range_K) for range_K in (ranges[key], weight_K))
        scales = [by_rule(activation_K, weight_K=weight_K, strength=strength)]
        if unit.norm and key != GATE_UP and view.scheme.spec.even_steps:
            x_MK = torch.cat([some_MK for member, _, some_MK in samples if member == key])
            refined_K = refine(scales[0], x_MK=x_MK, weight_NK=torch.cat(weights))
            scales = [refined_K] if torch.equal(refined_K, scales[0]) else [refined_K, *scales]
        groups[units] = [view.group(units, scale_K=scale_K) for scale_K in scales if bool((scale_K != 1).any())]
    return groups

"""Calibration: what quantising a model's layers costs on given text, and the smoothing that makes it cost less.

One decoder layer is in memory at a time. Two streams of activations go through it: the exact one, and the one that a
quantised engine would have. For each layer:

1. The exact stream gives the largest |x| of every input channel, and, on a sample of tokens, the error that quantising
   each GEMM alone makes.
2. s_k = a_k^alpha / w_k^(1 - alpha), with a the activations' range and w that of all quantised weights that read
   them, of query heads that share a head of values the largest; centred, so that its median is 1; rounded to a power of
   two. (Xiao et al. 2023, SmoothQuant.)
3. The same measurement on the same tokens with the scales folded in. A group that does not lower the error of the layer
   that reads it is dropped.
4. Layers above the error budget stay in BF16, and the quantised stream goes on through the rest.

At the end both streams go through the head, in bands of the vocabulary: the mismatch to expect.

    z, z'   logits of the exact and of the quantised stream, float32
    KL(p' || p) = sum_v p'_v (z'_v - z_v) - (lse z' - lse z)

The sums run along the bands in float64 with a moving maximum: no more than one band of logits is ever held.

Legend: B sequences of T tokens, M positions, H width, K input channels, R words of a band.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from appliance.errors import EngineError
from appliance.quant.checkpoint import Checkpoint, Ledger, StreamedModel
from appliance.quant.layer_view import Errors, LayerView
from appliance.quant.mismatch import measure_mismatch
from appliance.quant.profile import (
    LayerError,
    Memory,
    Origin,
    Predicted,
    Profile,
    Settings,
    Smoothing,
    SmoothingGroup,
    power_of_two,
)
from appliance.terms.families import Unit
from appliance.terms.schemes import Scheme

_BATCH_TOKENS = 2048  # of one forward: bounds the activations inside a layer
_POSITIONS = 1024  # of logits at a time


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
    on_layer: Callable[[int, int], None] = lambda done, total: None,
    ledger: Ledger | None = None,
) -> Profile:
    """Profile the model in `folder` on tokenised text, on the CPU.

    sequences: token ids, each of at least one token.  on_layer: called with the layers done and their number.
    Raises EngineError for a model of an unknown family or a checkpoint that is not whole, NumericsError when a weight
    or an activation is not finite.
    """
    ledger = ledger or Ledger()
    checkpoint = Checkpoint(folder, ledger=ledger)
    model = StreamedModel(checkpoint)
    batches = batches_of(sequences)
    embedded = [model.embed(batch.tokens_BT) for batch in batches]
    streams = _Streams(embedded, list(embedded))
    calls = [model.layer_calls(batch) for batch in embedded]
    layers: list[LayerError] = []
    groups: list[SmoothingGroup] = []
    activations: dict[str, Tensor] = {}
    for index in range(model.num_layers):
        with model.layer(index) as layer:
            view = LayerView(
                layer,
                family=model.family,
                prefix=f"model.layers.{index}.",
                scheme=scheme,
                ignore=settings.ignore,
                ledger=ledger,
                calls=[each[index] for each in calls],
                valid=[batch.valid_BT for batch in batches],
            )
            layers_here, groups_here, activations_here = _one_layer(view, streams, settings=settings)
            del view, layer
        layers += layers_here
        groups += groups_here
        activations |= activations_here
        on_layer(index + 1, model.num_layers)
    return Profile(
        origin=origin,
        scheme=scheme,
        settings=settings,
        smoothing=Smoothing(tuple(groups)),
        layers=tuple(layers),
        predicted=_predicted(model, streams, batches=batches),
        memory=Memory(
            peak_bytes=ledger.peak_bytes,
            largest_layer_bytes=model.largest_layer_bytes,
            model_bytes=sum(2 * math.prod(checkpoint.shape(name)) for name in checkpoint.names),
        ),
        activations=activations,
    )


@dataclass(frozen=True)
class Batch:
    tokens_BT: Tensor
    """[B, T] int64, 0 on padding."""
    valid_BT: Tensor
    """[B, T] bool, false on padding, which is at the end only."""


def batches_of(sequences: Sequence[Sequence[int]]) -> list[Batch]:
    """Sequences of like lengths together. What comes after a token does not change it, so padding does no harm."""
    if not any(sequences):
        raise EngineError("there is no text to calibrate with", hint="the task's training data has no prompts")
    ordered = sorted((each for each in sequences if each), key=len)
    batches = []
    while ordered:
        size = max(1, _BATCH_TOKENS // len(ordered[-1]))
        together, ordered = ordered[-size:], ordered[:-size]
        tokens_BT = torch.zeros(len(together), len(together[-1]), dtype=torch.int64)
        valid_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
        for row, sequence in enumerate(together):
            tokens_BT[row, : len(sequence)] = torch.tensor(sequence)
            valid_BT[row, : len(sequence)] = True
        batches.append(Batch(tokens_BT, valid_BT))
    return batches


def scales(activation_K: Tensor, *, weight_K: Tensor, strength: float) -> Tensor:
    """[K] float32, powers of two with median 1 (of those channels that have both); 1 where a channel has no range.
    activation_K, weight_K: >= 0, the largest |x| and |w| of each channel.  strength: alpha, in (0, 1]."""
    has_both_K = (activation_K > 0) & (weight_K > 0)
    ones_K = torch.ones_like(activation_K, dtype=torch.float64)
    if not bool(has_both_K.any()):
        return ones_K.float()
    log_K = strength * activation_K.double().log2() - (1 - strength) * weight_K.double().log2()
    log_K = torch.where(has_both_K, log_K - log_K[has_both_K].median(), torch.zeros_like(log_K))
    return power_of_two(torch.exp2(log_K))


def _one_layer(
    view: LayerView, streams: _Streams, *, settings: Settings
) -> tuple[list[LayerError], list[SmoothingGroup], dict[str, Tensor]]:
    """Of the profile, what the layer adds; the streams go through it."""
    plain, ranges = Errors(), dict[str, Tensor]()
    outputs, samples = view.exact(streams.exact, errors=plain, ranges=ranges)
    groups = _groups(view, ranges=ranges, strength=settings.strength)
    errors = {unit.members[0]: plain.relative(unit) for unit in view.units if unit.members[0] not in view.ignored}
    kept_groups, weight_errors = [], {}
    for unit in view.units:
        if (group := groups.get(unit)) is not None:
            view.fold(group)
            error = view.smoothed(unit, group=group, samples=samples).relative(unit)
            if error < plain.relative(unit):
                errors[unit.members[0]] = error
                kept_groups.append(group)
            else:
                view.fold(dataclasses.replace(group, scale_K=group.scale_K.reciprocal()))  # exactly back
        # A unit comes before those that are smoothed through it: its errors are those of rows as they were.
        weight_errors[unit] = view.weight_error(unit)
    kept = _kept(view, errors=errors, budget=settings.error_budget)
    streams.quantised = view.quantised(streams.quantised, kept=kept)
    streams.exact = outputs
    layers = [
        LayerError(
            layer=tuple(view.prefix + name for name in unit.layer),
            linears=tuple(view.prefix + member for member in unit.members),
            weight_error=weight_errors[unit],
            output_error=errors[unit.members[0]],
            output_error_plain=plain.relative(unit),
            kept=unit.members[0] in kept,
        )
        for unit in view.units
        if unit.members[0] in errors
    ]
    names = {unit.members[0]: unit.members for unit in view.units}
    activations = {view.prefix + member: value for key, value in ranges.items() for member in names[key]}
    return layers, kept_groups, activations


def _groups(view: LayerView, *, ranges: dict[str, Tensor], strength: float) -> dict[Unit, SmoothingGroup]:
    """A group for each quantised unit whose input can be smoothed, where its scales are not all 1."""
    groups = {}
    for unit in view.units:
        key = unit.members[0]
        can_smooth = bool(unit.norm or unit.through) and strength > 0
        if not can_smooth or key in view.ignored or key not in ranges:
            continue
        weight_K = torch.stack([weight.abs().amax(dim=0) for weight in view.weights(unit)]).amax(dim=0).float()
        activation_K, weight_K = (view.of_source(unit, range_K) for range_K in (ranges[key], weight_K))
        scale_K = scales(activation_K, weight_K=weight_K, strength=strength)
        if bool((scale_K != 1).any()):
            groups[unit] = view.group(unit, scale_K=scale_K)
    return groups


def _kept(view: LayerView, *, errors: dict[str, float], budget: float | None) -> frozenset[str]:
    """First members of the units to keep in BF16: those above the budget, and their other half where one layer of the
    engine (experts) is two units."""
    most = math.inf if budget is None else budget
    over = {name for unit in view.units if errors.get(unit.members[0], 0.0) > most for name in unit.layer}
    return frozenset(unit.members[0] for unit in view.units if over & set(unit.layer))


def _predicted(model: StreamedModel, streams: _Streams, *, batches: list[Batch]) -> Predicted | None:
    """None where no sequence has a next token."""
    target_M = torch.cat([batch.tokens_BT[:, 1:][batch.valid_BT[:, 1:]] for batch in batches])
    if not len(target_M):
        return None
    exact_MH, quantised_MH = (
        torch.cat(
            [
                model.final_norm(hidden_BTH[:, :-1][batch.valid_BT[:, 1:]])
                for hidden_BTH, batch in zip(stream, batches, strict=True)
            ]
        )
        for stream in (streams.exact, streams.quantised)
    )
    parts = [slice(first, first + _POSITIONS) for first in range(0, len(target_M), _POSITIONS)]
    exact, quantised = ([_Softmax(target_M[part]) for part in parts] for _ in range(2))
    for start, rows_RH in model.checkpoint.rows(model.head_name):
        rows_HR = rows_RH.float().t()
        for part, softmax, softmax_q in zip(parts, exact, quantised, strict=True):
            z_MR = exact_MH[part].float() @ rows_HR
            zq_MR = quantised_MH[part].float() @ rows_HR
            softmax.add(z_MR, difference_MR=zq_MR - z_MR, start=start)
            softmax_q.add(zq_MR, difference_MR=zq_MR - z_MR, start=start)
    pairs = zip(exact, quantised, strict=True)
    kl_M = torch.cat([q.moment_M / q.mass_M - (q.lse_M - p.lse_M) for p, q in pairs])
    on_text = measure_mismatch(
        torch.cat([each.log_prob_M for each in exact]),
        rollout_T=torch.cat([each.log_prob_M for each in quantised]),
        cap=None,
    )
    return Predicted(
        tokens=len(target_M),
        kl=max(0.0, float(kl_M.mean())),  # rounding can leave -1e-9
        k3_kl=on_text.k3_kl,
        kl_tokens=on_text.kl,
        probs_diff_mean=on_text.probs_diff_mean,
        weight_max=on_text.weight_max,
    )


class _Softmax:
    """Sums of one softmax along the bands: the maximum so far, exp(z - top), the same times d, and the target's z.
    target_M: int64, the text's next tokens."""

    def __init__(self, target_M: Tensor) -> None:
        self._target_M = target_M
        self._top_M = torch.full(target_M.shape, -torch.inf, dtype=torch.float64)
        self.mass_M, self.moment_M, self._logit_M = (torch.zeros_like(self._top_M) for _ in range(3))

    @property
    def lse_M(self) -> Tensor:
        return self._top_M + self.mass_M.log()

    @property
    def log_prob_M(self) -> Tensor:
        """Of the targets."""
        return self._logit_M - self.lse_M

    def add(self, logits_MR: Tensor, *, difference_MR: Tensor, start: int) -> None:
        top_M = torch.maximum(self._top_M, logits_MR.amax(dim=1).double())
        scale_M = (self._top_M - top_M).exp()
        weight_MR = (logits_MR - top_M[:, None].float()).exp_()  # the maximum is one of the logits: exact in float32
        self.mass_M = self.mass_M * scale_M + weight_MR.sum(dim=1, dtype=torch.float64)
        moment_M = weight_MR.mul_(difference_MR).sum(dim=1, dtype=torch.float64)
        self.moment_M = self.moment_M * scale_M + moment_M
        self._top_M = top_M
        inside_M = (self._target_M >= start) & (self._target_M < start + logits_MR.shape[1])
        self._logit_M[inside_M] = logits_MR[inside_M, self._target_M[inside_M] - start].double()

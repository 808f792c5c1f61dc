"""What a sync did to the quantised layers: four numbers per update, from a fixed sample of each layer's rows.

The sample of a weight is up to SAMPLED_ROWS of its rows, evenly spread over this rank's part and the same at every
sync; their codes are kept from one update to the next.

    codes_changed   fraction of the sampled codes that differ from those of the update before; None at the first
    saturated       fraction of the sampled codes that are the largest (+-127, +-448). Symmetric scales make at least
                    one per scale: a row of K INT8 codes has 1/K at rest
    scale_drift     mean over the scales of these rows of |log(s / s_first)|, s_first from the first update; a scale of
                    0 counts as 0
    layer_error     largest over the layers of ||W - W'|| / ||W|| (Frobenius) over the sampled rows
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module

from appliance.engine.quantised import Quantising
from appliance.quant.codec import INT8_MAX, Fp8Weight, Int8Weight, QuantisedWeight, dequantise
from appliance.quant.codec_fp8 import FP8_MAX, spread
from appliance.run.acknowledge import Telemetry

SAMPLED_ROWS = 8


@dataclass
class _Layer:
    """codes: of the sampled rows, at the last update.  first_scale: of the same rows, at the first."""

    codes: Tensor
    first_scale: Tensor


@dataclass
class _Sums:
    codes: int = 0
    changed: int = 0
    compared: int = 0
    saturated: int = 0
    drift: float = 0.0
    scales: int = 0
    error_max: float = 0.0
    seconds: float = 0.0


class TelemetryTap:
    """Listens to the quantised layers of a model: `begin`, the update, `read`."""

    def __init__(self, model: Module) -> None:
        self._layers: dict[tuple[str, int], _Layer] = {}
        self._sums = _Sums()
        self._names: dict[int, str] = {}
        self._weights_of: dict[str, int] = {}
        self.layer_errors: dict[str, float] = {}  # of each layer, when it was quantised last
        for name, layer in model.named_modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, Quantising):
                self._names[id(layer)] = name
                method.on_quantised = self._take

    def begin(self, switched: tuple[str, ...] = ()) -> None:
        """switched: layers that change their precision with this update, and have no codes to compare with."""
        self._sums = _Sums()
        self._weights_of.clear()
        self._layers = {key: kept for key, kept in self._layers.items() if key[0] not in switched}

    @property
    def seconds(self) -> float:
        """Spent here since `begin`."""
        return self._sums.seconds

    def read(self) -> Telemetry | None:
        """Of the update since `begin`; None when nothing was quantised."""
        sums = self._sums
        if not sums.codes:
            return None
        return Telemetry(
            codes_changed_fraction=sums.changed / sums.compared if sums.compared else None,
            saturated_fraction=sums.saturated / sums.codes,
            scale_drift=sums.drift / sums.scales,
            layer_error_max=sums.error_max,
        )

    def _take(self, layer: Module, weight_NK: Tensor, quantised: QuantisedWeight) -> None:
        started = time.perf_counter()
        self._measure(layer, weight_NK, quantised)
        self._sums.seconds += time.perf_counter() - started

    def _measure(self, layer: Module, weight_NK: Tensor, quantised: QuantisedWeight) -> None:
        name = self._names[id(layer)]
        self._weights_of[name] = number = self._weights_of.get(name, -1) + 1  # experts have several, in a fixed order
        rows = slice(0, None, max(1, -(-len(weight_NK) // SAMPLED_ROWS)))
        sample, scale = _rows(quantised, rows)
        codes = sample.codes_NK
        before = self._layers.get((name, number))
        if before is None:
            before = self._layers[name, number] = _Layer(codes=codes.clone(), first_scale=scale.clone())
        else:
            self._sums.changed += int((codes.view(torch.uint8) != before.codes.view(torch.uint8)).sum())
            self._sums.compared += codes.numel()
            before.codes = codes.clone()
        self._sums.codes += codes.numel()
        largest = INT8_MAX if isinstance(quantised, Int8Weight) else FP8_MAX
        self._sums.saturated += int((codes.float().abs() >= largest).sum())
        both = (scale > 0) & (before.first_scale > 0)
        self._sums.drift += float((scale[both].log() - before.first_scale[both].log()).abs().sum())
        self._sums.scales += scale.numel()
        wanted = weight_NK[rows].float()
        norm = float(wanted.norm())
        error = float((dequantise(sample) - wanted).norm()) / norm if norm > 0 else 0.0
        self._sums.error_max = max(self._sums.error_max, error)
        self.layer_errors[name] = error if number == 0 else max(error, self.layer_errors[name])


def _rows(quantised: QuantisedWeight, rows: slice) -> tuple[QuantisedWeight, Tensor]:
    """Some rows of a weight, and the scales that they have."""
    codes_NK = quantised.codes_NK[rows]
    if isinstance(quantised, Int8Weight):
        scale = quantised.scale_N1[rows]
        return Int8Weight(codes_NK=codes_NK, scale_N1=scale), scale
    block_rows, block_columns = quantised.block
    numbers = torch.arange(len(quantised.codes_NK), device=codes_NK.device)[rows]
    scale = quantised.scale[numbers // block_rows]
    wide = spread(scale, block=(1, block_columns), shape=tuple(codes_NK.shape))
    return Fp8Weight(codes_NK=codes_NK, scale=wide, block=(1, 1), scheme=quantised.scheme), scale

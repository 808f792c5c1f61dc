"""What a sync did to the quantised layers: four numbers per update, from a fixed sample of each layer's rows.

The sample of a weight is up to eight of its rows, evenly spread over this rank's part and the same at every
sync; their codes are kept from one update to the next.

    codes_changed   fraction of the sampled codes that differ from those of the update before; None at the first
    saturated       fraction of the sampled codes that are the largest (+-127, +-448; -8, -7 and 7). Symmetric scales
                    make at least one per scale: a row of K INT8 codes has 1/K at rest
    scale_drift     mean over the scales of these rows of |log(s / s_first)|, s_first from the first update that made
                    codes of this kind, whatever the layer computed in since; a scale of 0 counts as 0
    layer_error     largest over the layers of ||W - W'|| / ||W|| (Frobenius) over the sampled rows; W' is codes times
                    scales, in INT4 before the kernel rounds it to BF16

The scales of a run's first update are kept in `sync/` of its folder: later engines and attempts start there.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Module

from appliance.engine.config import layer_name
from appliance.engine.quantised import Quantising, sampling_step
from appliance.files import whole_file
from appliance.quant.codec import Codec, QuantisedWeight, codec_of
from appliance.record.events import append_event
from appliance.sync.records import SYNC_FOLDER, Telemetry

_TOGETHER = 1 << 21  # codes that are measured at once: 22 MiB with all intermediates

Key = tuple[str, int]  # name of a layer, number of one of its weights
Kind = tuple[float, int, torch.Size]  # of codes: largest magnitude, columns that share a scale, shape of the scales
FirstScales = dict[tuple[Key, Kind], Tensor]  # [R, S] of R sampled rows, S scales in each


@dataclass(frozen=True)
class _Sample:
    """Some rows of a weight, their codes and scales. R rows, K columns, S scales in each row."""

    weight_RK: Tensor
    codes_RK: Tensor
    scale_RS: Tensor
    columns: int
    """Number of columns that share a scale."""
    codec: Codec

    @property
    def kind(self) -> Kind:
        return self.codec.largest, self.columns, self.scale_RS.shape


@dataclass
class _Sums:
    codes: int = 0
    changed: int = 0
    compared: int = 0
    saturated: int = 0
    drift: float = 0.0
    scales: int = 0
    error_max: float = 0.0


class TelemetryTap:
    """Listener to the quantised layers of a model: `begin`, the update, `read`.

    A layer's sample is copied when the layer comes, and measured with many others: it is so small that the number of
    operations is what costs.
    """

    first: FirstScales
    """Scales of the run's first update."""
    layer_errors: dict[str, float]
    """Error of each layer, when it was quantised last."""
    seconds: float
    """Seconds spent here since `begin`."""

    def __init__(self, model: Module, *, first: FirstScales | None = None) -> None:
        """first: scales that an earlier attempt of the run recorded."""
        self.first = dict(first or {})
        self.layer_errors = {}
        self.seconds = 0.0
        self._sums = _Sums()
        self._codes: dict[Key, Tensor] = {}  # [R, K], of the last update
        self._waiting: dict[Key, _Sample] = {}
        self._codes_waiting = 0
        self._errors: dict[str, float] = {}  # of the running update
        self._names: dict[int, str] = {}
        self._weights_of: dict[str, int] = {}
        for name, layer in model.named_modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, Quantising):
                self._names[id(layer)] = layer_name(layer, name=name)
                method.on_quantised = self._take

    def begin(self, switched: tuple[str, ...] = ()) -> None:
        """Begin the telemetry of an update. switched: layers that change their precision with this update, and have no
        codes to compare with."""
        self._sums, self.seconds = _Sums(), 0.0
        self._forget_waiting()
        self._weights_of.clear()
        self._errors.clear()
        self._codes = {key: codes_RK for key, codes_RK in self._codes.items() if key[0] not in switched}

    def read(self) -> Telemetry | None:
        """Read the telemetry of the update since `begin`; None when nothing was quantised."""
        started = time.perf_counter()
        self._measure_waiting()
        self.seconds += time.perf_counter() - started
        sums = self._sums
        if not sums.codes:
            return None
        return Telemetry(
            codes_changed_fraction=sums.changed / sums.compared if sums.compared else None,
            saturated_fraction=sums.saturated / sums.codes,
            scale_drift=sums.drift / sums.scales,
            layer_error_max=sums.error_max,
        )

    def _take(self, layer: Module, weight_RK: Tensor, quantised: QuantisedWeight) -> None:
        started = time.perf_counter()
        name = self._names[id(layer)]
        self._weights_of[name] = number = self._weights_of.get(name, -1) + 1  # experts have several, in a fixed order
        self._waiting[name, number] = sample = _sample(weight_RK, quantised)
        self._codes_waiting += sample.codes_RK.numel()
        if self._codes_waiting > _TOGETHER:
            self._measure_waiting()
        self.seconds += time.perf_counter() - started

    def _measure_waiting(self) -> None:
        """Measure the samples that wait, those of one kind and shape together: those with codes to compare with, and
        the others."""
        alike: dict[object, list[Key]] = defaultdict(list)
        for key, sample in self._waiting.items():
            alike[sample.codes_RK.shape, sample.kind, key in self._codes].append(key)
        for keys in alike.values():
            self._measure(keys)
        self._forget_waiting()

    def _forget_waiting(self) -> None:
        self._waiting.clear()
        self._codes_waiting = 0

    def _measure(self, keys: list[Key]) -> None:
        """L layers with samples of one shape."""
        sums, samples = self._sums, [self._waiting[key] for key in keys]
        codes_LRK = torch.stack([sample.codes_RK for sample in samples])
        scale_LRS, kind = torch.stack([sample.scale_RS for sample in samples]), samples[0].kind
        firsts = [
            self.first.setdefault((key, kind), sample.scale_RS) for key, sample in zip(keys, samples, strict=True)
        ]
        first_LRS = torch.stack(firsts)
        if keys[0] in self._codes:
            before_LRK = torch.stack([self._codes[key] for key in keys])
            sums.changed += int((codes_LRK.view(torch.uint8) != before_LRK.view(torch.uint8)).sum())
            sums.compared += codes_LRK.numel()
        self._codes |= dict(zip(keys, codes_LRK, strict=True))
        codec = samples[0].codec
        values_LRK = codec.values(codes_LRK)
        sums.codes += values_LRK.numel()
        sums.saturated += int((values_LRK.abs() >= codec.largest).sum())
        both = (scale_LRS > 0) & (first_LRS > 0)
        sums.drift += float((scale_LRS[both].log() - first_LRS[both].log()).abs().sum())
        sums.scales += scale_LRS.numel()
        wanted_LRK = torch.stack([sample.weight_RK for sample in samples]).float()
        columns, length = samples[0].columns, values_LRK.shape[2]
        held_LRK = values_LRK * scale_LRS.repeat_interleave(columns, dim=2)[:, :, :length]
        error_L, norm_L = (held_LRK - wanted_LRK).flatten(1).norm(dim=1), wanted_LRK.flatten(1).norm(dim=1)
        errors = (error_L / norm_L).nan_to_num(nan=0.0).tolist()  # 0 / 0: a layer of zeros
        sums.error_max = max(sums.error_max, *errors)
        for (name, _), error in zip(keys, errors, strict=True):
            self.layer_errors[name] = self._errors[name] = max(error, self._errors.get(name, 0.0))


def _sample(weight_RK: Tensor, quantised: QuantisedWeight) -> _Sample:
    count = len(quantised.codes_NK)
    step = sampling_step(count)
    block_rows, columns = quantised.block
    blocks = [row // block_rows for row in range(0, count, step)]
    codec = codec_of(quantised.scheme)
    return _Sample(weight_RK, quantised.codes_NK[::step].clone(), quantised.scale[blocks], columns, codec)


def read_first_scales(run_dir: Path, *, replica: int, rank: int) -> FirstScales:
    """Read the scales that an engine before this one left, in this attempt or in the newest one that had an update:
    with all that it read itself. Empty for the first engine of a run.

    A file that cannot be read counts as none, with a `note`: it is about a metric. Raises OSError where that cannot be
    written.
    """
    path = _scales_file(run_dir, replica, rank)
    before = run_dir.glob(f"logs/*/{SYNC_FOLDER}/{path.name}")
    for file in (path, *sorted(before, key=lambda file: int(file.parts[-3]), reverse=True)):
        try:
            return _read(file)
        except FileNotFoundError:
            continue
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            what = f"{file.relative_to(run_dir)} cannot be read: scale_drift counts from an older file, or from now"
            append_event(run_dir, kind="note", what=what, why=f"{type(error).__name__}: {error}")
    return {}


def _read(file: Path) -> FirstScales:
    """Read the scales of a file. Raises OSError, SafetensorError, and ValueError or TypeError for names that are not
    ours."""
    first: FirstScales = {}
    for text, scale_RS in load_file(file).items():
        name, number, largest, columns = json.loads(text)
        first[(name, number), (largest, columns, scale_RS.shape)] = scale_RS
    return first


def write_first_scales(run_dir: Path, first: FirstScales, *, replica: int, rank: int) -> None:
    """Write the scales of the first update, as a whole file or not at all. Raises OSError."""
    path = _scales_file(run_dir, replica, rank)
    path.parent.mkdir(exist_ok=True)
    scales_by_key = {
        json.dumps([*key, largest, columns]): scale_RS.contiguous()
        for (key, (largest, columns, _)), scale_RS in first.items()
    }
    with whole_file(path) as partial:
        save_file(scales_by_key, partial)


def _scales_file(run_dir: Path, replica: int, rank: int) -> Path:
    return run_dir / SYNC_FOLDER / f"scales-{replica}-{rank}.safetensors"

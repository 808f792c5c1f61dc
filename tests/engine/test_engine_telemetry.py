"""The four numbers of an update, against their definitions in float64 on the sampled rows. No engine.

Legend: N rows, K columns.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import Module

from appliance.engine import telemetry
from appliance.engine.quantised import Quantising, sample_rows
from appliance.engine.telemetry import TelemetryTap, read_first_scales, write_first_scales
from appliance.quant.codec import dequantise, quantise
from appliance.sync.records import Telemetry
from appliance.terms.schemes import Scheme

SHAPES = ((64, 128), (200, 320), (5, 128), (64, 128))


class Method(Quantising):
    """Quantises nothing: the tests call its hook."""

    kernel_name = "none"

    def held_scale(self, layer: Module) -> None:
        return None


def model() -> Module:
    layers = torch.nn.ModuleList(Module() for _ in SHAPES)
    for layer in layers:
        layer.quant_method = Method()
    return layers


@pytest.mark.parametrize("sizes", [(96, 32, 32), (7, 3, 2), (1, 1), (5,)])
def test_the_sampled_rows_of_parts_are_those_of_the_whole(sizes: tuple[int, ...]) -> None:
    weight_NK, samples, start = torch.arange(float(sum(sizes)))[:, None], [], 0
    for part_NK in weight_NK.split(sizes):
        samples.append(sample_rows(part_NK, start=start, count=len(weight_NK)))
        start += len(part_NK)
    assert torch.equal(torch.cat(samples), weight_NK[:: -(-len(weight_NK) // 8)])
    assert torch.equal(torch.cat(samples), sample_rows(weight_NK))


def weights(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in SHAPES]
    found[3].zero_()
    return found


def update(
    tap: TelemetryTap,
    layers: Module,
    weights: list[Tensor],
    *,
    scheme: Scheme,
    order: list[int],
    switched: tuple[str, ...] = (),
) -> Telemetry:
    tap.begin(switched)
    for number in order:
        quantised = quantise(weights[number], scheme=scheme)
        layers[number].quant_method.on_quantised(layers[number], sample_rows(weights[number]), quantised)
    found = tap.read()
    assert found is not None and tap.seconds > 0 and max(tap.layer_errors.values()) == found.layer_error_max
    return found


def expected_telemetry(
    before: list[Tensor] | None, now: list[Tensor], *, scheme: Scheme, first: list[Tensor]
) -> Telemetry:
    codes, changed, saturated, drifts, errors = 0, 0, 0, [], []
    for place, weight_NK in enumerate(now):
        rows = range(0, len(weight_NK), -(-len(weight_NK) // 8))
        quantised_weight = quantise(weight_NK, scheme=scheme)
        own = quantised_weight.codes_NK[list(rows)].double()
        codes += own.numel()
        saturated += int((own.abs() >= {Scheme.INT8: 127, Scheme.INT4: 7}.get(scheme, 448)).sum())
        if before is not None:
            old = quantise(before[place], scheme=scheme).codes_NK.view(torch.uint8)
            changed += int((old != quantised_weight.codes_NK.view(torch.uint8))[list(rows)].sum())
        block = {Scheme.FP8: len(weight_NK), Scheme.FP8_BLOCK: 128}.get(scheme, 1)
        scale, old_scale = quantised_weight.scale.double(), quantise(first[place], scheme=scheme).scale.double()
        for row in rows:
            for new, old in zip(scale[row // block].tolist(), old_scale[row // block].tolist(), strict=True):
                drifts.append(abs(torch.tensor(new / old).log().item()) if new > 0 and old > 0 else 0.0)
        part = weight_NK[list(rows)].double()
        error = (dequantise(quantised_weight)[list(rows)].double() - part).norm()
        errors.append(float(error / part.norm()) if part.norm() > 0 else 0.0)
    return Telemetry(
        codes_changed_fraction=None if before is None else changed / codes,
        saturated_fraction=saturated / codes,
        scale_drift=sum(drifts) / len(drifts),
        layer_error_max=max(errors),
    )


@pytest.mark.parametrize("together", [1, 1 << 21])
@pytest.mark.parametrize("scheme", [scheme for scheme in Scheme if scheme.quantised])
def test_the_numbers_of_three_updates(scheme: Scheme, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers in any order, measured one by one or together. Sums of squares of 2560 numbers in float32: 1e-4. What
    INT4's kernel rounds to BF16 is not measured: of seven steps 2^-8, beside an error of a third of a step: 2e-3."""
    monkeypatch.setattr(telemetry, "_TOGETHER", together)
    layers = model()
    tap = TelemetryTap(layers)
    assert tap.read() is None
    states = [weights(1), weights(2), weights(2)]
    states[2][1] *= 1.5
    before = None
    for now, order in zip(states, ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]), strict=True):
        measured = update(tap, layers, now, scheme=scheme, order=order)
        right = expected_telemetry(before, now, scheme=scheme, first=states[0])
        assert measured.codes_changed_fraction == right.codes_changed_fraction
        assert measured.saturated_fraction == right.saturated_fraction
        assert measured.scale_drift == pytest.approx(right.scale_drift, rel=1e-4, abs=1e-9)
        assert measured.layer_error_max == pytest.approx(
            right.layer_error_max, rel=2e-3 if scheme is Scheme.INT4 else 1e-4
        )
        before = now


def test_scales_drift_since_the_first_update_whatever_was_computed_in_between() -> None:
    """A validation in BF16: all layers leave their scheme with one update and are back with the next. Codes have
    nothing to be compared with then; scales have. Codes of another kind have scales of their own."""
    layers = model()
    tap = TelemetryTap(layers)
    everything, order = tuple("0123"), [0, 1, 2, 3]
    update(tap, layers, weights(1), scheme=Scheme.INT8, order=order)
    tap.begin(everything)
    assert tap.read() is None
    measured = update(tap, layers, weights(2), scheme=Scheme.INT8, order=order, switched=everything)
    right = expected_telemetry(None, weights(2), scheme=Scheme.INT8, first=weights(1))
    assert measured.codes_changed_fraction is None
    assert measured.scale_drift == pytest.approx(right.scale_drift, rel=1e-4) and right.scale_drift > 0.01
    other = update(tap, layers, weights(2), scheme=Scheme.FP8_CHANNEL, order=order, switched=everything)
    assert other.scale_drift == 0
    back = update(tap, layers, weights(2), scheme=Scheme.INT8, order=order, switched=everything)
    assert back.scale_drift == pytest.approx(right.scale_drift, rel=1e-4)


@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.FP8_BLOCK])
def test_scales_drift_since_the_first_update_of_the_run_in_later_attempts_too(scheme: Scheme, tmp_path: Path) -> None:
    """The second attempt's first update is not the run's; its file has what it read of the first."""
    assert read_first_scales(tmp_path, replica=0, rank=1) == {}
    for attempt, seed in ((1, 1), (2, 2), (10, 3)):
        layers = model()
        tap = TelemetryTap(layers, first=read_first_scales(tmp_path, replica=0, rank=1))
        measured = update(tap, layers, weights(seed), scheme=scheme, order=[0, 1, 2, 3])
        right = expected_telemetry(None, weights(seed), scheme=scheme, first=weights(1))
        assert measured.scale_drift == pytest.approx(right.scale_drift, rel=1e-4, abs=1e-9)
        assert (measured.scale_drift > 0) == (attempt > 1)
        write_first_scales(tmp_path, tap.first, replica=0, rank=1)
        (tmp_path / "logs" / str(attempt)).mkdir(parents=True)
        (tmp_path / "sync").rename(tmp_path / "logs" / str(attempt) / "sync")


FIRST = (("layer", 0), (127.0, 1, torch.Size([2, 1]))), torch.tensor([[0.5], [0.25]])
SECOND = (("layer", 1), (448.0, 1, torch.Size([1, 1]))), torch.tensor([[2.0]])


def keep(run_dir: Path, *, attempt: int, first: dict) -> Path:
    """The file of an attempt that is over."""
    write_first_scales(run_dir, first, replica=0, rank=0)
    (run_dir / "logs" / str(attempt)).mkdir(parents=True)
    kept = (run_dir / "sync").rename(run_dir / "logs" / str(attempt) / "sync")
    return kept / "scales-0-0.safetensors"


def test_a_later_engine_of_an_attempt_counts_from_the_first_ones_scales(tmp_path: Path) -> None:
    keep(tmp_path, attempt=1, first=dict([SECOND]))
    write_first_scales(tmp_path, dict([FIRST]), replica=0, rank=0)
    assert set(read_first_scales(tmp_path, replica=0, rank=0)) == {FIRST[0]}


def test_first_scales_are_those_of_the_newest_attempt(tmp_path: Path) -> None:
    """The second attempt changed to another scheme: its file has what it read, and that."""
    keep(tmp_path, attempt=9, first=dict([FIRST]))
    keep(tmp_path, attempt=10, first=dict([FIRST, SECOND]))
    found = read_first_scales(tmp_path, replica=0, rank=0)
    assert set(found) == {FIRST[0], SECOND[0]}
    assert torch.equal(found[FIRST[0]], FIRST[1]) and torch.equal(found[SECOND[0]], SECOND[1])


@pytest.mark.parametrize("left", [b"", b"\x10", b"no header", None])
def test_first_scales_that_are_torn_count_as_none(tmp_path: Path, left: bytes | None) -> None:
    keep(tmp_path, attempt=1, first=dict([FIRST]))
    torn = keep(tmp_path, attempt=2, first=dict([FIRST, SECOND]))
    torn.write_bytes(torn.read_bytes()[:-1] if left is None else left)
    assert set(read_first_scales(tmp_path, replica=0, rank=0)) == {FIRST[0]}
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert event["kind"] == "note" and event["why"].startswith("SafetensorError: ")
    assert event["what"] == (
        "logs/2/sync/scales-0-0.safetensors cannot be read: scale_drift counts from an older file, or from now"
    )


def test_first_scales_are_on_the_disk_before_they_have_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, bool]] = []
    target = tmp_path / "sync" / "scales-0-0.safetensors"
    monkeypatch.setattr(os, "fsync", lambda number: synced.append((os.fstat(number).st_size, target.exists())))
    write_first_scales(tmp_path, dict([FIRST]), replica=0, rank=0)
    assert synced[0] == (target.stat().st_size, False)
    assert [is_there for _, is_there in synced] == [False, True]  # the folder, which has the name

"""What a rotation costs a weight update: `python -m benchmarks.rotation_sync [--turns 5] [-o docs/results]`.

An update folds what is fixed into each BF16 tensor that arrives, quantises it to INT8 and packs it. Here are all
tensors of a model with random weights, and what is folded takes turns in one run:

* smoothed: rows and columns are multiplied by powers of two, as the engine does it;
* rotated, blocks: what reads the residual stream becomes W diag(g) R, what writes to it R^T W, with blocks of Hadamard
  on R's diagonal; the values of heads likewise; embedding and head, too, which are two tensors then, also where they
  were one. `down_proj` stays smoothed through `up_proj`. In float32, rounded to BF16 once;
* rotated, whole: the same with a matrix R without zeros.

The rotations are those of benchmarks/rotation.py, which says what they gain. No engine is started: transport, digests
and proofs are the same on all sides, and not in the times.

Legend: N output and K input channels, H the width of the residual stream, V words, D the width of a head.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from appliance import console
from appliance.quant.codec_int8 import quantise_int8
from appliance.quant.cpu_gemm import kernel_of, load_kernels
from appliance.tasks.library import BUILT_IN_MODELS
from appliance.terms.shapes import ModelShape
from benchmarks.demo import processor
from benchmarks.rotation import BLOCK, hadamard, rotation, signs

MODELS = ("tiny-arithmetic", "smollm2-135m")


@dataclass(frozen=True)
class Turns:
    """The fixed matrices of a rotation, in float32."""

    stream: Tensor
    """[BLOCK, BLOCK] where R has blocks, all equal but for their signs; [H, H] where it is whole."""
    signs_H: Tensor
    """Signs of the blocks' rows; ones where R is whole."""
    values_DD: Tensor

    @classmethod
    def for_model(cls, shape: ModelShape, *, kind: str) -> Turns:
        """kind: `blocks` or `full`, as in benchmarks/rotation.py."""
        signs_D = signs(shape.head_size, seed=1)
        values_DD = (signs_D[:, None] * hadamard(shape.head_size)).float()
        if kind == "full":
            whole_HH = rotation("full", width=shape.hidden, seed=0).float()
            return cls(whole_HH, torch.ones(shape.hidden), values_DD)
        return cls(hadamard(BLOCK).float(), signs(shape.hidden, seed=0).float(), values_DD)

    def of_reader(self, weight_NH: Tensor, norm_H: Tensor) -> Tensor:
        """W diag(g) R."""
        scaled_NH = weight_NH.float() * (norm_H * self.signs_H)
        return (scaled_NH.view(len(scaled_NH), -1, len(self.stream)) @ self.stream).view_as(scaled_NH)

    def of_writer(self, weight_HK: Tensor) -> Tensor:
        """R^T W."""
        scaled_HK = weight_HK.float() * self.signs_H[:, None]
        blocks = scaled_HK.view(-1, len(self.stream), scaled_HK.shape[1])
        return (self.stream.t() @ blocks).view_as(scaled_HK)


def layers_of(shape: ModelShape) -> Iterator[dict[str, Tensor]]:
    """The matrices of each decoder layer, [N, K] BF16 by their last names."""
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    sizes = {
        "q": (queries, shape.hidden),
        "k": (keys, shape.hidden),
        "v": (keys, shape.hidden),
        "o": (shape.hidden, queries),
        "gate": (shape.intermediate, shape.hidden),
        "up": (shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }
    for _ in range(shape.layers):
        yield {name: torch.randn(size).mul_(0.02).bfloat16() for name, size in sizes.items()}


Fold = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def smoothing(shape: ModelShape) -> Fold:
    """Columns of what a norm feeds, rows of `up` and `v`, columns of `down` and `o`: each by a power of two."""
    width = {"hidden": shape.hidden, "down": shape.intermediate, "o": shape.heads * shape.head_size}
    factor_K = {name: torch.tensor([1.0, 2.0]).repeat(size // 2) for name, size in width.items()}
    rows = {"up": factor_K["down"], "v": factor_K["o"][: shape.kv_heads * shape.head_size]}

    def fold(layer: dict[str, Tensor]) -> dict[str, Tensor]:
        folded = {}
        for name, weight_NK in layer.items():
            smoothed_NK = weight_NK * factor_K.get(name, factor_K["hidden"]).bfloat16()
            folded[name] = smoothed_NK / rows[name].bfloat16()[:, None] if name in rows else smoothed_NK
        return folded

    return fold


def rotated(shape: ModelShape, turns: Turns) -> Fold:
    norm_H, factor_K = torch.ones(shape.hidden), torch.tensor([1.0, 2.0]).repeat(shape.intermediate // 2)
    width = shape.head_size

    def fold(layer: dict[str, Tensor]) -> dict[str, Tensor]:
        folded = {name: turns.of_reader(layer[name], norm_H) for name in ("q", "k", "v", "gate", "up")}
        folded["v"] = (turns.values_DD.t() @ folded["v"].view(-1, width, shape.hidden)).flatten(0, 1)
        folded["up"] /= factor_K[:, None]
        reading = layer["o"].float().view(shape.hidden, -1, width) @ turns.values_DD
        folded["o"] = turns.of_writer(reading.flatten(1))
        folded["down"] = turns.of_writer(layer["down"].float() * factor_K)
        return {name: weight_NK.bfloat16() for name, weight_NK in folded.items()}

    return fold


def install(layer: dict[str, Tensor]) -> None:
    """Quantise and pack a layer's fused matrices, as an engine does."""
    for parts in (("q", "k", "v"), ("o",), ("gate", "up"), ("down",)):
        quantised = quantise_int8(torch.cat([layer[part] for part in parts]))
        scale_N1 = quantised.scale.contiguous()
        kernel_of(*quantised.codes_NK.shape)(quantised.codes_NK, scale_N1=scale_N1)


def seconds_of(
    layers: Sequence[dict[str, Tensor]], *, fold: Fold, turns: Turns | None, words_VH: Tensor
) -> tuple[float, float]:
    """(seconds that folding takes, of the whole update). turns: of embedding and head, None where they are as sent."""
    folding, started = 0.0, time.perf_counter()
    for layer in layers:
        before = time.perf_counter()
        folded = fold(layer)
        folding += time.perf_counter() - before
        install(folded)
    before = time.perf_counter()
    if turns is not None:
        for norm_H in (
            torch.ones(words_VH.shape[1]),
            torch.full(words_VH.shape[1:], 2.0),
        ):  # embedding; head, with its norm
            turns.of_reader(words_VH, norm_H).bfloat16()
    folding += time.perf_counter() - before
    return folding, time.perf_counter() - started


def table(*, turns: int) -> list[str]:
    lines = ["| model | folded | folding, s | folding and installing, s | ÷ smoothed |", f"|{' --- |' * 5}"]
    for model in MODELS:
        shape = BUILT_IN_MODELS[model].shape
        layers = list(layers_of(shape))
        words_VH = torch.randn(shape.vocab, shape.hidden).mul_(0.02).bfloat16()
        blocks, whole = Turns.for_model(shape, kind="blocks"), Turns.for_model(shape, kind="full")
        ways: dict[str, tuple[Fold, Turns | None]] = {
            "smoothed": (smoothing(shape), None),
            "rotated, blocks": (rotated(shape, blocks), blocks),
            "rotated, whole": (rotated(shape, whole), whole),
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(turns + 1):
            for name, (fold, matrices) in ways.items():
                times[name].append(seconds_of(layers, fold=fold, turns=matrices, words_VH=words_VH))
        for name in ways:
            measured = times[name][1:]  # the first turn warms up
            ratio = median(one[1] / other[1] for one, other in zip(measured, times["smoothed"][1:], strict=True))
            folding, update = (median(column) for column in zip(*measured, strict=True))
            lines.append(f"| {model} | {name} | {folding:.3f} | {update:.3f} | {ratio:.2f} |")
            console.say(lines[-1])
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="measurements of each way, of which the median counts")
    parser.add_argument("-o", "--output", type=Path, help="folder for rotation_sync.md")
    arguments = parser.parse_args()
    load_kernels()
    lines = table(turns=arguments.turns)
    head = f"Made by `python -m benchmarks.rotation_sync --turns {arguments.turns}`. {datetime.date.today()}: "
    head += f"{processor()}, {torch.get_num_threads()} threads."
    text = "\n".join(["# What a rotation costs a weight update", "", head, "", *lines, ""])
    console.out(text)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "rotation_sync.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The GEMMs of one layer, kernel by kernel: `python -m benchmarks.gemm [--shapes qwen2.5-7b] [-o FILE]`.

vLLM's BF16 against both INT8 kernels for a CPU (engine/int8.py), on a GPU against CUTLASS's INT8 and FP8, with the
weights that a decoder layer has as vLLM fuses them: milliseconds of a multiplication, quantising the activations
included, and of packing a weight (on a GPU: quantising it). The kernels take turns; a ratio is the median of those of
single turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from appliance import console
from appliance.bench.job import NAMED_SHAPES, Shapes
from appliance.control_groups import usable_cores
from appliance.quant.codec_int8 import quantise_int8
from appliance.quant.cpu_gemm import OneDnnGemm, SglGemm, WideGemm, has_packed_kernel, kernel_of
from appliance.terms.schemes import Scheme

BF16 = "bf16"
CUTLASS = "cutlass"
PACK = 0  # instead of a number of tokens
TOKENS = (16, 32, 64, 128, 512)

Multiply = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    layer: str
    shape_NK: tuple[int, int]
    tokens: int
    """M of the GEMM, PACK for packing."""
    ms: dict[str, float]
    """Median by kernel."""
    faster: dict[str, float]
    """Than BF16, median of the turns."""
    chosen: str
    """The INT8 kernel that a rollout takes for this layer."""


def weights_of(shapes: Shapes) -> dict[str, tuple[int, int]]:
    """[output channels, input channels] of one decoder layer."""
    head = shapes.hidden // shapes.heads
    return {
        "qkv_proj": ((shapes.heads + 2 * shapes.kv_heads) * head, shapes.hidden),
        "o_proj": (shapes.hidden, shapes.heads * head),
        "gate_up_proj": (2 * shapes.intermediate, shapes.hidden),
        "down_proj": (shapes.hidden, shapes.intermediate),
    }


def measure(shapes: Shapes, *, tokens: tuple[int, ...], turns: int) -> list[Row]:
    measured_rows = []
    on_gpu = torch.cuda.is_available()
    for layer, (rows, columns) in weights_of(shapes).items():
        weight_NK = torch.randn(rows, columns, device="cuda" if on_gpu else "cpu").to(torch.bfloat16)
        packers = _on_gpu(weight_NK) if on_gpu else _packers(weight_NK)
        chosen = CUTLASS if on_gpu else kernel_of(rows, columns).name
        kernels: dict[str, Multiply] = {name: pack() for name, pack in packers.items()}
        for count in (PACK, *tokens):
            x_MK = torch.randn(count, columns, device=weight_NK.device).to(torch.bfloat16)
            calls = {name: (lambda k=k, x=x_MK: k(x)) for name, k in kernels.items()} if count else packers
            times = _take_turns(calls, turns=turns)
            ms = {name: 1e3 * median(each) for name, each in times.items()}
            measured_rows.append(Row(layer, (rows, columns), count, ms, _to_bf16(times), chosen))
    return measured_rows


def _to_bf16(times: dict[str, list[float]]) -> dict[str, float]:
    """Compute how many times as fast as BF16 each is: the median of the turns' ratios."""
    base = times[BF16]
    return {name: median(b / own for b, own in zip(base, each, strict=True)) for name, each in times.items()}


def _packers(weight_NK: Tensor) -> dict[str, Callable[[], Multiply]]:
    """Make, from a weight as it arrives, the function that multiplies by it. INT8's codes are there already."""
    quantised = quantise_int8(weight_NK)
    kinds = (kernel_of(1, 1), SglGemm) if has_packed_kernel() else (kernel_of(1, 1),)

    def pack(kind: type[OneDnnGemm | SglGemm | WideGemm]) -> Multiply:
        kernel = kind(quantised.codes_NK, scale_N1=quantised.scale)
        return lambda x_MK: kernel(x_MK, None)

    def bf16() -> Multiply:
        layer = Module()
        layer.weight = Parameter(weight_NK, requires_grad=False)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        return lambda x_MK: layer.cpu_linear(x_MK, layer.weight, None)

    return {BF16: bf16, **{kind.name: (lambda kind=kind: pack(kind)) for kind in kinds}}


def _on_gpu(weight_NK: Tensor) -> dict[str, Callable[[], Multiply]]:
    """Make packers as _packers does, for CUDA: vLLM's quantisers of tokens and CUTLASS. FP8 where the GPU has kernels
    for it."""
    from vllm import _custom_ops

    from appliance.engine.int8 import quantise_for_kernel

    def scaled(codes_NK: Tensor, scale: Tensor, quantise: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Multiply:
        def multiply(x_MK: Tensor) -> Tensor:
            codes_MK, scale_M1 = quantise(x_MK)
            return _custom_ops.cutlass_scaled_mm(
                codes_MK, codes_NK.t(), scale_a=scale_M1, scale_b=scale, out_dtype=torch.bfloat16
            )

        return multiply

    def int8() -> Multiply:
        held = quantise_for_kernel(weight_NK)
        return scaled(held.codes_NK, held.scale, lambda x_MK: _custom_ops.scaled_int8_quant(x_MK, symmetric=True)[:2])

    def fp8() -> Multiply:
        codes_NK, scale = _custom_ops.scaled_fp8_quant(weight_NK)
        return scaled(codes_NK, scale, lambda x_MK: _custom_ops.scaled_fp8_quant(x_MK, use_per_token_if_dynamic=True))

    able = torch.cuda.get_device_capability()
    kinds = {Scheme.INT8: int8, Scheme.FP8: fp8}
    has = {str(s): make for s, make in kinds.items() if s.spec.since <= able < (s.spec.until or (99, 0))}
    return {BF16: lambda: lambda x_MK: torch.nn.functional.linear(x_MK, weight_NK), **has}


def _take_turns(calls: dict[str, Callable[[], object]], *, turns: int) -> dict[str, list[float]]:
    """Seconds by kernel and turn, after a turn that does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-1, turns):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn >= 0:
                times[name].append(time.perf_counter() - started)
    return times


def table(rows: list[Row]) -> str:
    names = list(rows[0].ms)
    lines = [
        f"| layer | N x K | tokens | {' | '.join(f'{name}, ms' for name in names)} "
        f"| {' | '.join(f'{name} to BF16' for name in names[1:])} | taken |",
        "|" + " --- |" * (4 + len(names) + len(names) - 1),
    ]
    for row in rows:
        times = " | ".join(f"{row.ms[name]:.2f}" for name in names)
        ratios = " | ".join(f"{row.faster[name]:.2f}" for name in names[1:])
        n, k = row.shape_NK
        tokens = "packing" if row.tokens == PACK else row.tokens
        lines.append(f"| {row.layer} | {n} x {k} | {tokens} | {times} | {ratios} | {row.chosen} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gemm", description=__doc__)
    parser.add_argument("--shapes", choices=sorted(NAMED_SHAPES), default="qwen2.5-7b")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("-o", "--output", type=Path, help="file for the table")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)  # the type that vLLM's kernels answer in
    text = table(measure(NAMED_SHAPES[options.shapes], tokens=tuple(options.tokens), turns=options.turns))
    console.out(text)
    if options.output is not None:
        options.output.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

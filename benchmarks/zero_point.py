"""What a zero point per token gains and costs in INT8 rollouts on a CPU:
`python -m benchmarks.zero_point gemm [-o FILE]`, `python -m benchmarks.zero_point mismatch MODEL PROBLEMS [-o FILE]`.

Symmetric is what the engine does: a token's codes are round(x / s) with s = max |x| / 127. Asymmetric: round(x / s) + z
with s = (max x - min x) / 255 and a whole number z, the code of 0. vLLM's quantiser makes both. The product is

    y_mn = s_m t_n (sum_k c_mk q_nk  -  z_m sum_k q_nk)

and the second sum is known when a weight is packed. oneDNN takes s_m, z_m and t_n sum_k q_nk. The packed kernel `sgl`
quantises inside, symmetrically; the operator that takes codes is not registered by vLLM 0.31. So asymmetric is oneDNN
on every host.

`gemm`: the kernel that a rollout takes (quant/cpu_gemm.py) against oneDNN, symmetric and asymmetric. `mismatch`: by the
forward of benchmarks/rotation.py, on answers that the BF16 model samples to PROBLEMS (a JSON line with a `question` for
each), the KL over the whole vocabulary of a smoothed MODEL (a folder with a Llama) where only some matrices are
asymmetric. No engine is started.

Legend: M tokens, N output and K input channels.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from appliance import console
from appliance.bench.job import NAMED_SHAPES, Shapes
from appliance.quant.codec_int8 import quantise_int8
from appliance.quant.cpu_gemm import OneDnnGemm, kernel_of, load_kernels
from benchmarks import rotation
from benchmarks.demo import processor
from benchmarks.gemm import weights_of

SHAPES = {
    "smollm2-135m": Shapes(hidden=576, intermediate=1536, heads=9, kv_heads=3, layers=30),
    "qwen2.5-7b": NAMED_SHAPES["qwen2.5-7b"],
}
TOKENS = (1, 16, 64, 256)
PACKING = 0  # in place of a number of tokens
ANSWER_TOKENS = 16


class AsymmetricGemm(OneDnnGemm):
    """As OneDnnGemm, with a zero point for each token of the activations."""

    name = "onednn, asymmetric"

    def __init__(self, codes_NK: Tensor, *, scale_N1: Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(codes_NK, scale_N1=scale_N1, dtype=dtype)
        sum_N1 = codes_NK.sum(dim=1, keepdim=True, dtype=torch.int32)
        self._correction_1N = (sum_N1.float() * scale_N1).t().contiguous()

    def __call__(self, x_MK: Tensor, bias_N: Tensor | None) -> Tensor:
        codes_MK = torch.empty_like(x_MK, dtype=torch.int8)
        scale_M1 = torch.empty((len(x_MK), 1), dtype=torch.float32)
        zero_M1 = torch.empty((len(x_MK), 1), dtype=torch.int32)
        torch.ops._C.dynamic_scaled_int8_quant(codes_MK, x_MK.contiguous(), scale_M1, zero_M1)
        y_MN = torch.empty((len(x_MK), self._rows), dtype=x_MK.dtype)
        operands = (codes_MK, scale_M1, zero_M1, self._correction_1N, bias_N)
        torch.ops._C.onednn_scaled_mm(y_MN, *operands, self._handle)
        return y_MN


def gemm_table(*, turns: int) -> list[str]:
    """Milliseconds of the four GEMMs of a decoder layer together, quantising the activations included; the kernels
    take turns, and a ratio is the median of those of single turns."""
    lines = [
        "| model | tokens | taken, ms | oneDNN, ms | asymmetric, ms | asymmetric / taken | asymmetric / oneDNN |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model, shapes in SHAPES.items():
        times = _layer_times(shapes, turns=turns)
        for count in (PACKING, *TOKENS):
            taken, symmetric, asymmetric = (times[count, kind] for kind in ("taken", "onednn", "asymmetric"))
            medians = " | ".join(f"{1e3 * median(seconds):.2f}" for seconds in (taken, symmetric, asymmetric))
            ratios = " | ".join(f"{_ratio(asymmetric, base):.2f}" for base in (taken, symmetric))
            lines.append(f"| {model} | {count or 'packing'} | {medians} | {ratios} |")
    return lines


def _ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
    return median(one / other for one, other in zip(seconds, base, strict=True))


def _layer_times(shapes: Shapes, *, turns: int) -> dict[tuple[int, str], list[float]]:
    """Seconds by (tokens, kind) and turn, summed over the layer's matrices."""
    times = {(count, kind): [0.0] * turns for count in (PACKING, *TOKENS) for kind in ("taken", "onednn", "asymmetric")}
    for rows, columns in weights_of(shapes).values():
        quantised = quantise_int8(torch.randn(rows, columns).bfloat16())
        kinds = {"taken": kernel_of(rows, columns), "onednn": OneDnnGemm, "asymmetric": AsymmetricGemm}
        packers = {
            kind: (lambda pack=pack, q=quantised: pack(q.codes_NK, scale_N1=q.scale)) for kind, pack in kinds.items()
        }
        gemms = {kind: pack() for kind, pack in packers.items()}
        for count in (PACKING, *TOKENS):
            x_MK = torch.randn(count, columns).bfloat16()
            calls: dict[str, Callable[[], object]] = {
                kind: packers[kind] if count == PACKING else (lambda gemm=gemms[kind], x=x_MK: gemm(x, None))
                for kind in kinds
            }
            for turn in range(-1, turns):  # the first one does not count
                for kind, call in calls.items():
                    started = time.perf_counter()
                    call()
                    if turn >= 0:
                        times[count, kind][turn] += time.perf_counter() - started
    return times


def matrix_table(table: rotation.Table, smoothed: rotation.Llama) -> list[str]:
    """The KL where these fused matrices have asymmetric activations and the others symmetric ones."""
    fused = tuple(rotation.FUSED)
    for names in [(), *((name,) for name in fused), *combinations(fused, 3), fused]:
        ways = {name: "asymmetric" if name in names else "int8" for name in fused}
        table.add(f"asymmetric: {', '.join(names) or 'none'}", smoothed, ways)
    return table.lines


def mismatch_table(folder: Path, problems: Path) -> list[str]:
    rotation.ANSWER_TOKENS = ANSWER_TOKENS
    pairs = rotation.answers(folder, problems)
    prefix = rotation.common_prefix([prompt for prompt, _ in pairs])
    quarter = pairs[:: rotation.CALIBRATES]
    others = [pair for number, pair in enumerate(pairs) if number % rotation.CALIBRATES]
    calibration, measured = (rotation.batches_of(part, skip=len(prefix)) for part in (quarter, others))
    model = rotation.Llama.load(folder)
    ranges = rotation.ranges_of(model, calibration, prefix=prefix)
    smoothed = rotation.smooth_values(rotation.smooth_down(rotation.smooth_norms(model, ranges), ranges), ranges)
    table = rotation.Table(model, measured, prefix=prefix)
    return [f"{table.num_tokens} tokens.", "", *matrix_table(table, smoothed)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    gemm, mismatch = commands.add_parser("gemm"), commands.add_parser("mismatch")
    mismatch.add_argument("model", type=Path, help="folder of a Llama model")
    mismatch.add_argument("problems", type=Path, help="file with a JSON line for each question")
    gemm.add_argument("--turns", type=int, default=15)
    for command in (gemm, mismatch):
        command.add_argument("--threads", type=int, default=2)
        command.add_argument("-o", "--output", type=Path, help="file for the tables")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    load_kernels()
    if arguments.command == "gemm":
        lines = gemm_table(turns=arguments.turns)
    else:
        lines = mismatch_table(arguments.model, arguments.problems)
    head = f"Made by `python -m benchmarks.zero_point {arguments.command}`. {datetime.date.today()}: {processor()}, "
    page = f"{head}{arguments.threads} threads.\n\n" + "\n".join(lines) + "\n"
    console.out(page)
    if arguments.output is not None:
        arguments.output.write_text(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

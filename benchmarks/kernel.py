"""The fused INT8 row quantiser against a plain copy, at the layer shapes of Qwen2.5-32B, on one CUDA GPU.

`python -m benchmarks.kernel [-o FILE]`. Bandwidth counts what must move: 2 bytes read and 1 written per weight;
the copy is measured in the same run, on as many bytes. The projected sync is quantisation alone, of all layers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from appliance import console
from appliance.engine.int8 import quantise_for_kernel
from appliance.errors import PreflightError
from appliance.quant.codec_int8 import quantise_int8

LAYERS = 64
SHAPES_NK = {  # of one layer; q, k, v and gate, up as vLLM fuses them
    "qkv_proj": (7168, 5120),
    "o_proj": (5120, 5120),
    "gate_up_proj": (55296, 5120),
    "down_proj": (5120, 27648),
}
REPETITIONS = 50


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", dest="file", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise PreflightError("this benchmark needs a CUDA GPU")
    result = measure()
    console.out(json.dumps(result, indent=1))
    if arguments.file:
        arguments.file.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def measure(
    shapes: dict[str, tuple[int, int]] = SHAPES_NK, *, device: str = "cuda", repetitions: int = REPETITIONS
) -> dict[str, object]:
    """shapes: (output channels, input channels) of the weights of one layer.  device: `cpu` shows that this runs."""
    rows = []
    for name, shape in shapes.items():
        weight_NK = torch.randn(shape, device=device).to(torch.bfloat16)
        quantised, expected = quantise_for_kernel(weight_NK), quantise_int8(weight_NK.cpu())
        source = torch.empty(weight_NK.numel() * 3 // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        timed = seconds if device == "cuda" else seconds_on_a_cpu
        kernel_s = timed(lambda weight=weight_NK: quantise_for_kernel(weight), repetitions)
        copy_s = timed(lambda into=target, out_of=source: into.copy_(out_of), repetitions)
        rows.append(
            {
                "layer": name,
                "shape": list(shape),
                "equals_codec": bool(torch.equal(quantised.codes_NK.cpu(), expected.codes_NK))
                and bool(torch.equal(quantised.scale.cpu(), expected.scale)),
                "kernel_us": kernel_s * 1e6,
                "copy_us": copy_s * 1e6,
                "kernel_gb_per_s": 3 * weight_NK.numel() / kernel_s / 1e9,
                "copy_gb_per_s": 3 * weight_NK.numel() / copy_s / 1e9,
                "of_copy_bandwidth": copy_s / kernel_s,
            }
        )
    total_s = LAYERS * sum(row["kernel_us"] for row in rows) / 1e6
    named = torch.cuda.get_device_name() if device == "cuda" else device
    return {"device": named, "rows": rows, "projected_quantisation_32b_s": total_s}


def seconds(call: Callable[[], object], repetitions: int) -> float:
    """Median, by CUDA events, after a warm-up."""
    for _ in range(5):
        call()
    times = []
    for _ in range(repetitions):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times)


def seconds_on_a_cpu(call: Callable[[], object], repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return median(times)


if __name__ == "__main__":
    sys.exit(main())

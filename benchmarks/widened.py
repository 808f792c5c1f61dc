"""What torch's GEMMs of BF16 and FP16 cost on this CPU, as torch has them and through float32: `python -m
benchmarks.widened [-o docs/results]`.

Per layout of the operands (as in a forward, and in the two products of a backward), one core, the two in turns; a ratio
is the median of those of single turns. Where oneDNN has fast ones the appliance leaves torch's (quant/cpu_gemm.py).
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from appliance import console
from appliance.quant.cpu_gemm import widened_types
from benchmarks.demo import processor

SIZES, TURNS, TURN_S = (256, 1024), 5, 0.2
LAYOUTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x w^T": lambda x, w: x @ w.t(),
    "dy w": lambda x, w: x @ w,
    "dy^T x": lambda x, w: x.t() @ w,
}


def seconds(multiply: Callable[[], object]) -> float:
    """Time one multiplication."""
    start, count = time.perf_counter(), 0
    while time.perf_counter() < start + TURN_S:
        multiply()
        count += 1
    return (time.perf_counter() - start) / count


def row(size: int, dtype: torch.dtype, layout: str) -> str:
    x, w = (torch.randn(size, size).to(dtype) for _ in range(2))
    multiply, native_s, wide = LAYOUTS[layout], [], []
    for _ in range(TURNS):
        native_s.append(seconds(lambda: multiply(x, w)))
        wide.append(seconds(lambda: multiply(x.float(), w.float()).to(dtype)))
    ratio = median(a / b for a, b in zip(native_s, wide, strict=True))
    cells = (
        str(size),
        str(dtype).removeprefix("torch."),
        layout,
        f"{median(native_s) * 1e3:.2f}",
        f"{median(wide) * 1e3:.2f}",
    )
    return f"| {' | '.join(cells)} | {ratio:.1f} |"


ABOUT = (
    "How fast are torch's products of BF16 and FP16 on this processor, compared with converting both matrices to",
    "float32, multiplying, and converting the result back? Milliseconds are medians of the turns, *times as fast* the",
    "median of the turns' ratios. *x w^T* is the product of a forward, *dy w* and *dy^T x* are those of a backward,",
    "of square matrices. Types for which a run takes the way through float32 on this processor are *widened*.",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="folder for widened.md")
    output = parser.parse_args().output
    torch.set_num_threads(1)
    lines = ["| M = N = K | type | product | torch's, ms | through float32, ms | times as fast |", "| --- " * 6 + "|"]
    lines += [row(*each) for each in itertools.product(SIZES, (torch.bfloat16, torch.float16), LAYOUTS)]
    names = ", ".join(sorted(str(each).removeprefix("torch.") for each in widened_types())) or "none"
    head = f"Made by `python -m benchmarks.widened`. {datetime.date.today()}: {processor()}, one core. "
    head += f"Widened here: {names}."
    title = "# Products in BF16 and FP16, or through float32"
    page = "\n".join([title, "", *ABOUT, "", head, "", *lines, ""])
    console.out(page)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "widened.md").write_text(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

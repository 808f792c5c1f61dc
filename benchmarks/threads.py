"""What a second thread brings to models of several sizes: `python -m benchmarks.threads [--turns 5] [-o docs/results]`.

The plan gives a process one thread for a model of at most `TINY_WEIGHTS` (terms/shapes.py), else all cores. Two things
take turns with one thread and with two: an update's forward and backward in BF16 of 16 sequences of 64 tokens, by
transformers' Qwen2 with random weights and a vocabulary of 272 words; and the products of a decoding step of 128
sequences in INT8, by the kernel of this host.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from appliance import console
from appliance.quant.codec_int8 import quantise_int8
from appliance.quant.cpu_gemm import kernel_of, load_kernels
from appliance.tasks.library import TINY_MODELS
from appliance.terms.shapes import ModelShape
from benchmarks.demo import processor

SEQUENCES, TOKENS, DECODED = 16, 64, 128
TINY = TINY_MODELS["tiny-arithmetic"].shape


def shape_of(*, hidden: int, intermediate: int, layers: int) -> ModelShape:
    heads = hidden // 64
    sizes = {"hidden": hidden, "intermediate": intermediate, "layers": layers, "heads": heads, "kv_heads": heads}
    return ModelShape(**sizes, head_size=64, vocab=TINY.vocab, tied=True)


SHAPES = (
    TINY,
    shape_of(hidden=384, intermediate=1024, layers=4),
    shape_of(hidden=512, intermediate=1408, layers=5),
    shape_of(hidden=576, intermediate=1536, layers=6),
    shape_of(hidden=576, intermediate=1536, layers=12),
)


def update_of(shape: ModelShape) -> Callable[[], None]:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            tie_word_embeddings=True,
        )
    ).bfloat16()
    tokens_BT = torch.randint(shape.vocab, (SEQUENCES, TOKENS))

    def update() -> None:
        model(tokens_BT, labels=tokens_BT).loss.backward()
        model.zero_grad()

    return update


def decoding_of(shape: ModelShape) -> Callable[[], None]:
    width = shape.heads * shape.head_size
    both = width + 2 * shape.kv_heads * shape.head_size
    sizes = (
        (both, shape.hidden),
        (shape.hidden, width),
        (2 * shape.intermediate, shape.hidden),
        (shape.hidden, shape.intermediate),
    )
    gemms = []
    for rows, columns in sizes:
        quantised = quantise_int8(torch.randn(rows, columns).bfloat16())
        gemm = kernel_of(rows, columns)(quantised.codes_NK, scale_N1=quantised.scale.contiguous())
        gemms.append((gemm, torch.randn(DECODED, columns).bfloat16()))

    def decode() -> None:
        for _ in range(shape.layers):
            for gemm, x_MK in gemms:
                gemm(x_MK, None)

    return decode


def seconds_of(function: Callable[[], None], *, turns: int) -> tuple[float, float]:
    """Medians with one thread and with two, in turns."""
    times: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(turns + 1):
        for threads, taken in times.items():
            torch.set_num_threads(threads)
            started = time.perf_counter()
            function()
            taken.append(time.perf_counter() - started)
    one, two = (median(taken[1:]) for taken in times.values())  # the first turn warms up
    return one, two


ABOUT = (
    "From which size on is a model worth a second thread? The plan gives each process one thread for a model of at",
    "most 4.2 million weights, else all cores of the host. *update* is a forward and a backward of 16 sequences of 64",
    "tokens, *decoding* the INT8 products of a step of 128 sequences; milliseconds with one thread and with two,",
    "medians of turns. *one ÷ two* is how many times as fast two threads are.",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--turns", type=int, default=5, help="measurements with each number of threads, of which the median counts"
    )
    parser.add_argument("-o", "--output", type=Path, help="folder for threads.md")
    arguments = parser.parse_args()
    load_kernels()
    head = ("weights", "update, one thread, ms", "two", "one ÷ two", "decoding, one thread, ms", "two", "one ÷ two")
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for shape in SHAPES:
        cells = [shape.millions]
        for function in (update_of(shape), decoding_of(shape)):
            one, two = seconds_of(function, turns=arguments.turns)
            cells += [f"{1000 * one:.1f}", f"{1000 * two:.1f}", f"{one / two:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
        console.say(lines[-1])
    about = f"Made by `python -m benchmarks.threads --turns {arguments.turns}`. {datetime.date.today()}: {processor()}."
    text = "\n".join(["# A second thread", "", *ABOUT, "", about, "", *lines, ""])
    console.out(text)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "threads.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The share of a decoding step that draws samples: `python -m benchmarks.sampling [-o docs/results]`.

One engine of vLLM's in this process, with random weights of a model's shapes, generates for requests that all have a
seed. Its steps take turns: one draws by seed and position (engine/inverse_cdf.py), the next with vLLM's own sampler
from the requests' generators. Drawing is all that a sampler does between logits and words: softmax or exponentials,
random numbers, the choice. Log-probs, which both sides report and compute alike, are in the step and not in the
drawing. Prompts are read in one step before, which does not count.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from appliance import console
from appliance.bench.job import GIB, NAMED_SHAPES, PROMPT_TOKENS, Shapes
from appliance.control_groups import usable_cores
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation
from benchmarks.demo import processor
from benchmarks.sync import set_environment

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from vllm import LLM

BAR = 0.05
OURS, VLLMS = "by seed and position", "vLLM's own"
MODELS = {
    "SmolLM2-135M": Shapes(hidden=576, intermediate=1536, heads=9, kv_heads=3, layers=30, vocabulary=49_152),
    "Qwen2.5-0.5B, with 7B's vocabulary": NAMED_SHAPES["qwen2.5-0.5b"].replace(layers=24, vocabulary=152_064),
}

Forward = Callable[..., "tuple[Tensor, Tensor | None]"]


@dataclass(frozen=True)
class Step:
    """One decoding step of the whole batch."""

    sampler: str
    seconds: float
    draw_s: float
    """Seconds of the step that drew samples."""

    @property
    def share(self) -> float:
        return self.draw_s / self.seconds


class TakingTurns:
    """In place of a sampler's `forward`: each call draws in another way than the last, and is timed."""

    def __init__(self, llm: LLM, *, vllms: Forward) -> None:
        """vllms: TopKTopPSampler.forward_cpu before the plugin replaced it. Raises SystemExit where it did not."""
        worker = llm.llm_engine.model_executor.driver_worker
        self._sampler = getattr(worker, "worker", worker).model_runner.sampler.topk_topp_sampler
        self._forwards = {OURS: type(self._sampler).forward_cpu, VLLMS: vllms}
        if self._forwards[OURS] is vllms:
            raise SystemExit("the plugin is not installed here: both sides would be vLLM's own")
        self._sampler.logprobs_mode = "raw_logprobs"  # drawing alone; log-probs are computed below
        self._sampler.forward = self.forward
        self.turn = 0
        self.draw_s = 0.0

    @property
    def name(self) -> str:
        return (OURS, VLLMS)[self.turn % 2]

    def forward(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        log_probs = logits.log_softmax(dim=-1)  # before: vLLM's own overwrites the logits
        began = time.perf_counter()
        words, _ = self._forwards[self.name](self._sampler, logits, generators, k, p)
        self.draw_s = time.perf_counter() - began
        return words, log_probs


def measure(shapes: Shapes, *, scheme: Scheme, rows: int, steps: int, vllms: Forward) -> list[Step]:
    """Decoding steps, each sampler in turns. steps: of both together.  vllms: as of TakingTurns."""
    from vllm import LLM, SamplingParams

    from appliance.bench.child import qwen2_config

    with tempfile.TemporaryDirectory() as folder:
        qwen2_config(shapes).save_pretrained(folder)
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            max_model_len=PROMPT_TOKENS + steps + 8,
            max_num_seqs=rows,
            max_num_batched_tokens=max(2048, rows * PROMPT_TOKENS),
            kv_cache_memory_bytes=GIB,
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=False,
            **Quantisation(scheme=scheme).engine_arguments(),
        )
    turns = TakingTurns(llm, vllms=vllms)
    engine = llm.llm_engine
    for row in range(rows):
        prompt = {"prompt_token_ids": [(7 * row + column) % 500 + 1 for column in range(PROMPT_TOKENS)]}
        params = SamplingParams(seed=row, max_tokens=steps + 4, ignore_eos=True, logprobs=0, detokenize=False)
        engine.add_request(str(row), prompt, params)
    for warm_up in range(3):  # the prompts, then each sampler once
        turns.turn = warm_up
        engine.step()
    measured = []
    for turn in range(steps):
        turns.turn, began = turn, time.perf_counter()
        engine.step()
        measured.append(Step(turns.name, time.perf_counter() - began, turns.draw_s))
    return measured


def table_row(name: str, shapes: Shapes, *, rows: int, steps: Sequence[Step]) -> str:
    cells = [f"{name}, {shapes.layers} layers", f"{shapes.vocabulary:,}", str(rows)]
    for sampler in (VLLMS, OURS):
        of_sampler = [step for step in steps if step.sampler == sampler]
        cells.append(f"{1e3 * median(step.draw_s for step in of_sampler):.1f} ms")
        cells.append(f"{1e3 * median(step.seconds for step in of_sampler):.0f} ms")
        cells.append(f"{100 * median(step.share for step in of_sampler):.1f} %")
    return "| " + " | ".join(cells) + " |"


ABOUT = (
    "How much of a decoding step goes into drawing the samples, by vLLM's own sampler and by ours, which draws by",
    "seed and position? Both draw in turns in one engine, for requests that all have a seed. For each sampler: the",
    "milliseconds that it draws in, those of the whole step, and the share. Drawing is all between logits and words;",
    "log-probs, which both compute alike, are in the step and not in the drawing.",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling", description=__doc__)
    parser.add_argument(
        "--model",
        choices=sorted(MODELS),
        action="append",
        help="model to measure, may be given several times (default: all)",
    )
    parser.add_argument("--rows", type=int, default=128, help="sequences at once")
    parser.add_argument(
        "--steps", type=int, default=20, help="decoding steps of each model, with both samplers together"
    )
    parser.add_argument("--scheme", type=Scheme, default=Scheme.INT8)
    parser.add_argument("-o", "--output", type=Path, help="folder for sampling.md")
    options = parser.parse_args()
    threads = usable_cores()
    set_environment(threads)
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    vllms = TopKTopPSampler.forward_cpu  # vLLM loads the plugin, which replaces it, with the first engine
    lines = [
        "# Drawing samples, of a decoding step",
        "",
        *ABOUT,
        "",
        f"`python -m benchmarks.sampling`, {datetime.date.today()}: {processor()}, {threads} threads. {options.scheme} "
        f"rollouts, random weights, {options.steps} steps in turns, medians. The bar is {100 * BAR:.0f} %.",
        "",
        "| shapes | words | sequences | vLLM's sampler draws in | of a step of | share | ours draws in | of a step of "
        "| share |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in options.model or MODELS:
        steps = measure(MODELS[name], scheme=options.scheme, rows=options.rows, steps=options.steps, vllms=vllms)
        lines.append(table_row(name, MODELS[name], rows=options.rows, steps=steps))
        console.say(lines[-1])
    text = "\n".join(lines) + "\n"
    console.out(text)
    if options.output:
        (options.output / "sampling.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

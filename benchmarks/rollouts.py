"""INT8 against BF16 in whole rollouts: `python -m benchmarks.rollouts [-o docs/results]`.

A case is one `appliance bench --json`: both engines in one process, in turns, prompts read, answers sampled with
log-probs, until the last sample of a step has ended. The case of SmolLM2 is a step's rollouts of its recipe.

Qwen2.5-7B with all its layers fits neither the memory nor the time of a small host. Two cases have its shapes and its
whole vocabulary, with few layers. A layer costs the same wherever it is, so the seconds for 1,000 tokens are

    t(n) = rest + n * layer

of n layers; two numbers of layers give both terms, and so t(28). It is done for each pair of one case with each pair of
the other: the median is the estimate, the smallest and the largest are its error.

Shares: of SmolLM2, by the processor time of an engine with one thread: other work on the host still moves it, but less
than seconds. What is not in a named part is Python, the scheduler and what keeps the batch.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from appliance import console
from appliance.control_groups import usable_cores
from appliance.terms.schemes import Scheme
from appliance.terms.settings import CPU_KV_BLOCK, Quantisation
from benchmarks.demo import processor
from benchmarks.sync import set_environment

RECIPE = "smollm2-int8"
BARS = {"SmolLM2": 1.2, "7B": 1.5}
LAYERS_OF_7B = 28
FEW, MORE = 1, 8
"""Layers of 7B's shapes in its two cases."""
BATCH, NEW_TOKENS = 32, 32
GIB = 1 << 30
OTHER = "Python, scheduler, batch"
READING, DECODING = "reading the prompts", "a decoding step"
VLLM_BLOCK = 128  # tokens, as vLLM has it on a CPU: longer than the prompts, so that none is shared
UNSHARED = f"{READING}, blocks of {VLLM_BLOCK}"


@dataclass(frozen=True)
class Case:
    """One `appliance bench`."""

    name: str
    shapes: str = ""
    """Name for `--shapes`; empty: the recipe's own model and prompts."""

    def file(self, folder: Path) -> Path:
        return folder / f"rollouts-{self.name}.json"

    def arguments(self, *, pairs: int) -> list[str]:
        shapes = ["--shapes", self.shapes] if self.shapes else []
        return ["bench", RECIPE, *shapes, "--pairs", str(pairs), "--json"]


def of_7b(layers: int) -> Case:
    return Case(f"7b-{layers}", f"qwen2.5-7b,layers={layers},batch={BATCH},new_tokens={NEW_TOKENS}")


CASES = {case.name: case for case in (Case("smollm2"), of_7b(FEW), of_7b(MORE))}
SHARES = "shares"


@dataclass(frozen=True)
class Spread:
    """Of several pairs: the median, the smallest and the largest."""

    middle: float
    least: float
    most: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.least:.2f}-{self.most:.2f})"


SCHEMES = (Scheme.BF16, Scheme.INT8)
Pair = tuple[float, float]  # of BF16 and of INT8, in one turn
CLOCKS = ("seconds", "processor_s")


def pairs_of(result: dict[str, Any], *, clock: str) -> list[Pair]:
    """Seconds for 1,000 tokens, turn by turn: samples end where they end, and the schemes' are not the same.

    result: what `appliance bench --json` printed.  clock: one of CLOCKS.
    """
    turns: dict[int, dict[str, float]] = {}
    for turn in result["measurements"]:
        turns.setdefault(turn["pair"], {})[turn["scheme"]] = 1000 * turn[clock] / turn["tokens"]
    return [(turn[Scheme.BF16], turn[Scheme.INT8]) for _, turn in sorted(turns.items())]


def extrapolated(few: list[Pair], more: list[Pair], *, layers: tuple[int, int], whole: int) -> list[Pair]:
    """Pairs of a model of `whole` layers, from each pair of `few` with each of `more`. layers: of the two."""
    factor = (whole - layers[0]) / (layers[1] - layers[0])
    return [
        (one[0] + factor * (other[0] - one[0]), one[1] + factor * (other[1] - one[1]))
        for one, other in itertools.product(few, more)
    ]


class PartTimes:
    """Processor time of an engine's thread, by the part of the model that spent it.

    Hooks of torch around the modules that do the work; none of them is inside of another.
    """

    def __init__(self, model: Any, sampler: Any) -> None:
        from vllm.model_executor.custom_op import CustomOp
        from vllm.model_executor.layers.attention import Attention
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        self.seconds: Counter[str] = Counter()
        self._began = 0.0
        self._watch(sampler, "sampling and log-probs")
        for module in model.modules():
            if isinstance(module, LinearBase):
                self._watch(module, "linear layers")
            elif isinstance(module, Attention):
                self._watch(module, "attention and its cache")
            elif isinstance(module, LogitsProcessor):
                self._watch(module, "head")
            elif isinstance(module, CustomOp) and not any(module.children()):
                self._watch(module, "norms, activation, rotary")

    def _watch(self, module: Any, part: str) -> None:
        def begin(*_: object) -> None:
            self._began = time.thread_time()

        def end(*_: object) -> None:
            self.seconds[part] += time.thread_time() - self._began

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)


def step_parts(workload: dict[str, Any], *, scheme: Scheme, block: int, steps: int = 10) -> dict[str, dict[str, float]]:
    """Milliseconds of processor time by part: of the steps that read the prompts, and of one decoding step.

    workload: of the case of SmolLM2; its prompts have all the tokens that they may have.  block: tokens of a block of
    the KV cache. In this process, with one thread, set before torch is imported.
    """
    from vllm import LLM, SamplingParams

    samples, length = workload["samples_per_prompt"], workload["max_prompt_tokens"]
    rows = workload["num_prompts"] * samples
    llm = LLM(
        workload["model_path"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=length + steps + 8,
        max_num_seqs=rows,
        block_size=block,
        kv_cache_memory_bytes=GIB // 2,
        logprobs_mode="processed_logprobs",
        **Quantisation(scheme=scheme).engine_arguments(),
    )
    engine = llm.llm_engine
    worker = engine.model_executor.driver_worker
    runner = getattr(worker, "worker", worker).model_runner
    parts = PartTimes(runner.get_model(), runner.sampler)

    def begin(name: str, *, tokens: int) -> None:
        llm.reset_prefix_cache()
        for row in range(rows):
            prompt = {"prompt_token_ids": [(7 * (row // samples) + column) % 500 + 1 for column in range(length)]}
            params = SamplingParams(seed=row, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
            engine.add_request(f"{name}-{row}", prompt, params)

    def spent(work: Callable[[], object], *, times: int) -> dict[str, float]:
        parts.seconds.clear()
        began = time.thread_time()
        work()
        whole = time.thread_time() - began
        parts.seconds[OTHER] = whole - parts.seconds.total()
        return {part: 1e3 * seconds / times for part, seconds in parts.seconds.items()}

    begin("warm-up", tokens=2)
    while engine.has_unfinished_requests():
        engine.step()
    begin("measured", tokens=steps + 2)
    reading = spent(lambda: _until_all_read(engine, rows), times=1)
    decoding = spent(lambda: [engine.step() for _ in range(steps)], times=steps)
    return {READING: reading, DECODING: decoding}


def _until_all_read(engine: Any, rows: int) -> None:
    """Steps until each request has its first token; those that were read first generate meanwhile."""
    scheduler = engine.engine_core.engine_core.scheduler
    while scheduler.waiting or any(not request.num_output_tokens for request in scheduler.running):
        engine.step()
    assert len(scheduler.running) == rows, "more tokens are asked for than these steps generate"


def measure(case: Case, *, pairs: int, folder: Path, settings: Sequence[str]) -> None:
    """Run the case and keep what it printed. Raises CalledProcessError."""
    overrides = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "appliance", *case.arguments(pairs=pairs), *overrides]
    began, busy_before, spent_before = time.monotonic(), _busy_s(), _children_s()
    result = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    others_s = (_busy_s() - busy_before) - (_children_s() - spent_before)
    cores = usable_cores()
    result |= {"host": f"{processor()}, {cores} cores", "date": str(datetime.date.today()), "kept": None}
    result["others"] = max(0.0, others_s / (time.monotonic() - began) / cores)
    del result["workload"]["prompts_parquet"]
    case.file(folder).write_text(json.dumps(result, indent=1) + "\n")


def _busy_s() -> float:
    """Seconds that all cores of the host worked since it started."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


def _children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def measure_shares(folder: Path, *, scheme: Scheme) -> None:
    """Add those of one scheme to the file: a process has the engines of one scheme."""
    workload = json.loads(CASES["smollm2"].file(folder).read_text())["workload"]
    set_environment(1)
    parts = step_parts(workload, scheme=scheme, block=CPU_KV_BLOCK)
    parts[UNSHARED] = step_parts(workload, scheme=scheme, block=VLLM_BLOCK)[READING]
    file = folder / f"rollouts-{SHARES}.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | {str(scheme): parts}, indent=1) + "\n")


ABOUT = (
    "How many times as fast are whole rollouts with INT8 as with BF16? *BF16, s* and *INT8, s* are seconds for 1,000",
    "tokens, medians; the ratios are those of single pairs, median and extremes. *by processor time* compares what",
    "each side took of the processor, whatever else ran. *other work* is the share of all cores that other processes",
    "used meanwhile.",
)


def page(folder: Path) -> str:
    """What the files of the folder say, those that are there."""
    cases = {name: case.file(folder) for name, case in CASES.items()}
    results = {name: json.loads(file.read_text()) for name, file in cases.items() if file.exists()}
    lines = [
        "| rollouts | BF16, s | INT8, s | INT8 ÷ BF16 (min-max) | by processor time | bar | other work |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, result in results.items():
        of_model = name == "smollm2"
        load = result["workload"]
        label = (
            f"SmolLM2-135M, {load['num_prompts']} prompts of {load['samples_per_prompt']} samples" if of_model else ""
        )
        label = label or f"Qwen2.5-7B's shapes, {load['shapes']['layers']} of {LAYERS_OF_7B} layers"
        pairs = [pairs_of(result, clock=clock) for clock in CLOCKS]
        lines.append(_row(label, pairs, bar=str(BARS["SmolLM2"]) if of_model else "", others=f"{result['others']:.0%}"))
    if (few := results.get(of_7b(FEW).name)) and (more := results.get(of_7b(MORE).name)):
        both = [[pairs_of(result, clock=clock) for result in (few, more)] for clock in CLOCKS]
        pairs = [extrapolated(*each, layers=(FEW, MORE), whole=LAYERS_OF_7B) for each in both]
        label = f"Qwen2.5-7B, {LAYERS_OF_7B} layers, **extrapolated** from {FEW} and {MORE}"
        lines.append(_row(label, pairs, bar=str(BARS["7B"]), others=""))
    shares = folder / f"rollouts-{SHARES}.json"
    if shares.exists():
        lines += ["", *_shares_table(json.loads(shares.read_text()))]
    hosts = dict.fromkeys(f"{result['date']}: {result['host']}" for result in results.values())
    return "\n".join(["# INT8 against BF16, whole rollouts", "", *ABOUT, "", *hosts, "", *lines]) + "\n"


def _row(label: str, by_clock: list[list[Pair]], *, bar: str, others: str) -> str:
    """by_clock: pairs by each of CLOCKS."""
    seconds = [f"{median(values):.2f}" for values in zip(*by_clock[0], strict=True)]
    ratios = [str(Spread.from_values([bf16 / int8 for bf16, int8 in pairs])) for pairs in by_clock]
    return "| " + " | ".join([label, *seconds, *ratios, bar, others]) + " |"


def _shares_table(shares: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    lines = [
        "| SmolLM2, one thread | part | BF16, ms | share | INT8, ms | share |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    bf16, int8 = shares[Scheme.BF16], shares[Scheme.INT8]
    for phase in bf16:
        totals = [sum(one[phase].values()) for one in (bf16, int8)]
        for part in sorted(bf16[phase], key=lambda part, phase=phase: -bf16[phase][part]):
            cells = [
                f"{one[phase][part]:.1f} | {100 * one[phase][part] / total:.0f} %"
                for one, total in zip((bf16, int8), totals, strict=True)
            ]
            lines.append(f"| {phase} | {part} | {' | '.join(cells)} |")
        lines.append(f"| {phase} | **all** | {totals[0]:.1f} | | {totals[1]:.1f} | {totals[0] / totals[1]:.2f} times |")
        without = totals[0] / (totals[0] - bf16[phase]["linear layers"])
        lines.append(f"| {phase} | if linear layers cost nothing | | | | {without:.2f} times |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollouts", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=[*CASES, SHARES], help="measure only these; the page has the results of all files"
    )
    parser.add_argument("--shares-of", type=Scheme, help=argparse.SUPPRESS)  # a process for each engine
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="setting of the recipe"
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/results"), help="folder of the files")
    options = parser.parse_args()
    if options.shares_of:
        measure_shares(options.output, scheme=options.shares_of)
        return 0
    for name in options.only or [*CASES, SHARES]:
        if name == SHARES:
            for scheme in SCHEMES:
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.rollouts",
                    "--shares-of",
                    scheme,
                    "-o",
                    str(options.output),
                ]
                subprocess.run(command, check=True)
        else:
            measure(CASES[name], pairs=options.pairs, folder=options.output, settings=options.settings)
    console.out(page(options.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a trainer's `load_weights` costs under FLASHRL_CONFIG: `python -m benchmarks.updates [-o docs/results]`.

Three engines in this process take the same tensors in turns, one tensor at a time, as TRL and OpenRLHF send them:
vLLM's own, without our plugin and unproven, and ours in BF16 and in INT8 with every layer proven. Random weights of a
Qwen2's shapes. On a CPU vLLM packs its BF16 weights away and refuses a plain `load_weights`; what it has there, and
what its side does here, is the layerwise reload of its own `reload_weights`.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from appliance import console
from appliance.bench.job import NAMED_SHAPES, Shapes
from appliance.control_groups import usable_cores
from benchmarks.sync import MAX_RATIO, peak_of_tensors, random_state, set_environment, started_runner

if TYPE_CHECKING:
    from torch import Tensor

PLAIN = "vLLM, BF16"
OURS = ("bf16", "int8")
ABOUT = """What does a weight update by `load_weights` cost when `FLASHRL_CONFIG` lets vLLM
quantise and prove the weights? *vLLM, BF16* is vLLM's own, unproven; `FLASHRL_CONFIG=bf16` and `=int8` are ours."""
LEGEND = """* **update**: seconds from the first tensor to the end; **processor s**: of all threads.
* **to vLLM's**: as a multiple of vLLM's own in the same turn, median and range of the turns.
* **extra memory**: the most that tensors took above what they took before, from PyTorch's record of its allocations, in
  two more updates; and the same in decoder layers of BF16."""


@dataclass(frozen=True)
class Side:
    """One engine and how it is updated."""

    name: str
    update: Callable[[dict[str, Tensor]], None]
    seconds: list[float] = field(default_factory=list)
    """Seconds of each turn."""
    processor_s: list[float] = field(default_factory=list)


def plain(folder: Path) -> Side:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    runner = started_runner(folder)

    def update(tensors: dict[str, Tensor]) -> None:
        with set_current_vllm_config(runner.vllm_config), torch.no_grad():
            initialize_layerwise_reload(runner.get_model())
            for each in tensors.items():
                runner.get_model().load_weights([each])
            finalize_layerwise_reload(runner.get_model(), runner.model_config)

    return Side(PLAIN, update)


def ours(folder: Path, config: str) -> Side:
    from appliance.engine.update import WeightState
    from appliance.engine.ways_in import ways_into
    from flashrl_compat.plugin import register
    from flashrl_compat.variables import CONFIG_VARIABLE

    os.environ[CONFIG_VARIABLE] = config
    register()
    runner = started_runner(folder)
    ways = ways_into(runner.get_model())

    def update(tensors: dict[str, Tensor]) -> None:
        before = ways.report.version
        for each in tensors.items():
            runner.get_model().load_weights([each])
        ends_with_its_last_layer = (ways.report.version, ways.report.state) == (before + 1, WeightState.WHOLE)
        assert ends_with_its_last_layer

    return Side(f"FLASHRL_CONFIG={config}", update)


def measure(shapes: Shapes, *, turns: int) -> list[tuple[Side, int]]:
    """Each side with its seconds of `turns` turns, after one that warms up, and its extra bytes."""
    with tempfile.TemporaryDirectory() as folder:
        tensors = random_state(shapes, folder=Path(folder))
        sides = [plain(Path(folder)), *(ours(Path(folder), config) for config in OURS)]
        for turn in range(-1, turns):
            for side in sides:
                started, worked = time.perf_counter(), time.process_time()
                side.update(tensors)
                if turn >= 0:
                    side.seconds.append(time.perf_counter() - started)
                    side.processor_s.append(time.process_time() - worked)
        return [(side, peak_of_tensors(lambda side=side: side.update(tensors), times=2)) for side in sides]


def ratios(side: list[float], base: list[float]) -> list[float]:
    return [one / other for one, other in zip(side, base, strict=True)]


def spread(found: list[float]) -> str:
    return f"{median(found):.2f} ({min(found):.2f}-{max(found):.2f})"


def table(measured: list[tuple[Side, int]], *, layer_bytes: int) -> str:
    heads = ("engine", "update", "to vLLM's", "processor s", "to vLLM's", "extra memory")
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    base = measured[0][0]
    for side, extra in measured:
        clock = f"{median(side.seconds):.3f} s | {spread(ratios(side.seconds, base.seconds))}"
        worked = f"{median(side.processor_s):.3f} | {spread(ratios(side.processor_s, base.processor_s))}"
        lines.append(
            f"| {side.name} | {clock} | {worked} | {extra / 2**20:.0f} MiB, {extra / layer_bytes:.2f} layers |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.updates", description=__doc__)
    parser.add_argument("--shapes", choices=sorted(NAMED_SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("-o", "--output", type=Path, help="folder for updates.md")
    options = parser.parse_args()
    set_environment(options.threads)
    os.environ["VLLM_PLUGINS"] = ""  # ours is registered once vLLM's own engine is up
    shapes = NAMED_SHAPES[options.shapes].replace(layers=options.layers)
    measured = measure(shapes, turns=options.turns)
    layer = 2 * (3 * shapes.hidden * shapes.intermediate + 2 * shapes.hidden**2 * (1 + shapes.kv_heads / shapes.heads))
    text = f"{heading(options, layer_bytes=int(layer))}\n\n{table(measured, layer_bytes=int(layer))}\n\n{LEGEND}\n"
    console.out(text)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "updates.md").write_text(text)
    slow = [side.name for side, _ in measured if median(ratios(side.seconds, measured[0][0].seconds)) > MAX_RATIO]
    if slow:
        console.say(f"above {MAX_RATIO} times vLLM's own: {', '.join(slow)}")
    return 0


def heading(options: argparse.Namespace, *, layer_bytes: int) -> str:
    import torch
    import vllm

    return (
        f"# An update by load_weights, beside plain vLLM\n\n{ABOUT}\n\n{options.shapes}, {options.layers} layers of "
        f"{layer_bytes / 2**20:.0f} MiB in BF16; {options.turns} updates of each engine in turns, medians; every layer "
        f"proven at each; {options.threads} threads on {platform.machine()}, torch {torch.__version__}, "
        f"vLLM {vllm.__version__}."
    )


if __name__ == "__main__":
    sys.exit(main())

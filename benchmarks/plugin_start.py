"""How much later an engine of vLLM's starts with the plugin: `python -m benchmarks.plugin_start [-o docs/results]`.

Two kinds of process start the same small engine in turns: one that is set to load no plugin, and one under
FLASHRL_CONFIG=bf16 with this environment's plugins. From the process's start to the engine's, by the wall and by
processor time, which other work on the machine touches less.
"""

from __future__ import annotations

import argparse
import datetime
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from appliance import console
from appliance.bench.job import NAMED_SHAPES
from appliance.control_groups import usable_cores
from appliance.engine.vllm_versions import vllm_version
from benchmarks.demo import processor
from benchmarks.sync import random_state, set_environment, started_runner

SIDES = {"vLLM, BF16": {"VLLM_PLUGINS": ""}, "FLASHRL_CONFIG=bf16": {"FLASHRL_CONFIG": "bf16"}}
BAR_S = 0.3


def start_once(folder: Path, variables: dict[str, str]) -> tuple[float, float]:
    """Seconds, and seconds of processors. Raises CalledProcessError where the engine does not start."""
    inherited = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.plugin_start", "--start", str(folder)]
    subprocess.run(command, check=True, env={**inherited, **variables}, capture_output=True)
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


ABOUT = (
    "How much later does an engine of vLLM start when the plugin is loaded? Both kinds of process start the same",
    "small engine in turns. Seconds are medians of the starts, from the start of the process to that of the engine;",
    "*later* is the median of the turns' differences.",
)


def table(times_by_side: dict[str, list[tuple[float, float]]]) -> str:
    """Medians, and of the second side what it takes more in the median pair."""
    plain, ours = times_by_side.values()
    more = [
        [mine - theirs for mine, theirs in zip(one, other, strict=True)] for one, other in zip(ours, plain, strict=True)
    ]
    rows = ["| engine | start | processor seconds |", "| --- | --- | --- |"]
    rows += [
        f"| {name} | {median(wall for wall, _ in turns):.2f} s | {median(spent for _, spent in turns):.2f} |"
        for name, turns in times_by_side.items()
    ]
    wall, spent = (median(each[kind] for each in more) for kind in (0, 1))
    return "\n".join([*rows, f"| **later** (at most {BAR_S} s is the bar) | **{wall:+.2f} s** | {spent:+.2f} |"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plugin_start", description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, help="folder for plugin-start.md")
    options = parser.parse_args()
    if options.start is not None:
        started_runner(options.start)
        return 0
    set_environment(usable_cores())
    with tempfile.TemporaryDirectory() as folder:
        random_state(NAMED_SHAPES["qwen2.5-0.5b"].replace(layers=1), folder=Path(folder))
        times_by_side: dict[str, list[tuple[float, float]]] = {name: [] for name in SIDES}
        for turn in range(-1, options.turns):
            for name, variables in SIDES.items():
                took = start_once(Path(folder), variables)
                times_by_side[name] += [took] if turn >= 0 else []
    page = (
        "\n".join(("# An engine's start with the plugin", "", *ABOUT, ""))
        + f"\n`python -m benchmarks.plugin_start`, {datetime.date.today()}: vLLM {vllm_version()}, {processor()}, "
        f"{usable_cores()} threads, {options.turns} starts of each.\n\n{table(times_by_side)}"
    )
    console.out(page)
    if options.output is not None:
        (options.output / "plugin-start.md").write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())

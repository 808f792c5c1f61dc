"""From the command to the end of the first step, phase by phase: `python -m benchmarks.start [-o FOLDER]`.

The demo as `make demo` runs it, with what it caches already there, once to fill that cache and then TURNS times. A
phase begins with its event; the first one with the command. Processor seconds are those of all processes of a run, to
its end. Then the imports of its second phase in their order, each in what it adds to those before it, in processes of
their own. `start.md` goes into FOLDER.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from appliance import console
from appliance.trainer.entry import IMPORTS
from benchmarks.demo import RECIPE
from benchmarks.telemetry import Where

TURNS = 5
IMPORT_THEM = """
import importlib, json, sys, time
from appliance.trainer import entry, forks
seconds = {}
with forks.as_ray_worker():
    for name in entry.IMPORTS:
        begin = time.perf_counter()
        importlib.import_module(name)
        seconds[name] = time.perf_counter() - begin
json.dump(seconds, open(sys.argv[1], "w"))
"""
COMMAND = ("train", RECIPE, "--set", "rollout.scheme=auto", "--set", "trainer.steps=1")


def run(folder: Path, name: str) -> tuple[dict[str, float], float]:
    """Seconds of each phase until the first step's end, in order; processor seconds of the run.

    Raises CalledProcessError where the training fails.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    marks = [("command", time.time())]
    argv = [sys.executable, "-m", "appliance", *COMMAND, "--name", name, "--set", f"cluster.run_dir={folder}"]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    events = [json.loads(line) for line in (folder / name / "events.jsonl").read_text().splitlines()]
    phases = [(event["what"], event["time"]) for event in events if event["kind"] == "phase"]
    stepped = [what for what, _ in phases].index("update")
    marks += phases[: stepped + 2]  # the step ends with its sync, where the next phase begins
    seconds: dict[str, float] = {}
    for (what, begin), (_, end) in itertools.pairwise([*marks, phases[stepped + 2]]):
        seconds[what] = seconds.get(what, 0.0) + end - begin
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imports(folder: Path) -> dict[str, float]:
    """Seconds of each import, in order. Raises CalledProcessError where one fails."""
    answer = folder / "imports.json"
    subprocess.run([sys.executable, "-c", IMPORT_THEM, str(answer)], check=True)
    return json.loads(answer.read_text())


def table(runs: list[tuple[dict[str, float], float]]) -> str:
    """Medians over the runs."""
    lines = ["| phase | s |", "| --- | --- |"]
    lines += [f"| {what} | {median(seconds[what] for seconds, _ in runs):.1f} |" for what in runs[0][0]]
    totals = sorted(sum(seconds.values()) for seconds, _ in runs)
    lines.append(f"| **to the end of the first step** | **{median(totals):.1f}** ({totals[0]:.1f}-{totals[-1]:.1f}) |")
    lines.append(f"| processor seconds, to the end of the run | {median(spent for _, spent in runs):.1f} |")
    return "\n".join(lines) + "\n"


def imports_table(turns: list[dict[str, float]]) -> str:
    """Medians over the turns."""
    lines = ["| import | s |", "| --- | --- |"]
    lines += [f"| `{name}` | {median(seconds[name] for seconds in turns):.1f} |" for name in IMPORTS]
    return "\n".join(lines) + "\n"


ABOUT = (
    "How long does `make demo` take from the command to the end of its first step, phase by phase, when its model and",
    "profile are in the cache? Seconds are medians over the starts. A phase begins with its event, the first one with",
    "the command. *processor seconds* are those of all processes. The table of imports has what each module of",
    "`IMPORTS` in `trainer/entry.py` adds to those before it, in a process of its own.",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    output = parser.parse_args().output
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), "cache")
        where = Where.now(RECIPE)
        runs = [run(Path(folder), f"turn-{turn}") for turn in range(TURNS)]
        imported = [imports(Path(folder)) for _ in range(TURNS)]
    head = "\n".join(("# From the command to the first step", "", *ABOUT, ""))
    page = f"{head}\nMade by `python -m benchmarks.start`. {where.text}.\n\n{table(runs)}\n{imports_table(imported)}"
    console.out(page)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "start.md").write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())

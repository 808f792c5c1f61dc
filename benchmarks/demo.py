"""What the README promises of the demo, measured: `python -m benchmarks.demo -o FOLDER`.

Trains the tiny recipe as a user does, once per setting and seed, one after the other, and writes `demo.json` (every
number and curve) and `demo.md` (the tables). Settings: INT8, which is `rollout.scheme=auto` as in `make demo` (a host
where that means another scheme is refused), the same with one precision flow, with and without a pass for the old
log-probs, BF16, and INT8 with learning rate 0, which shows what part of a climb is learning. The model and its profile
are made before the clock starts. What `demo.json` in FOLDER holds of other settings and seeds stays: `--seeds 0`
measures one again. A time with `~` was taken while the machine had other work.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from appliance import console
from appliance.compare.results import busy_share
from appliance.errors import TrainingError
from appliance.processes import find_processes
from appliance.record.events import pss_bytes
from appliance.terms.environment import RUN_VARIABLE

RECIPE = "arithmetic-tiny-int8"
SETTINGS = {
    "int8": ("rollout.scheme=auto",),
    "int8, one flow": ("trainer.forward=rollout", "trainer.old_log_probs=recompute"),
    "int8, one flow, no pass": ("trainer.forward=rollout",),
    "bf16": ("rollout.scheme=bf16",),
    "int8, learning rate 0": ("optimizer.learning_rate=0",),
}
SAMPLE_MEMORY_EVERY_S = 2.0
MAX_BUSY = 0.1


@dataclass(frozen=True)
class Trained:
    """One run. Times in seconds from the start of the command; memory is the sum of proportional set sizes, bytes."""

    setting: str
    seed: int
    code: int
    total_s: float
    first_step_s: float
    step_s: float
    rollout_tokens_per_s: float
    peak_pss_bytes: int
    validation: tuple[tuple[int, float], ...]
    """(step, greedy reward)."""
    rewards: tuple[float, ...]
    """Mean sampled reward per step."""
    busy: float
    """Share of all cores that other processes used just before it started, 0..1."""
    equal_fraction: float | None = None
    """Tokens whose log-prob in training is the rollout's, 0..1, of the step that has the fewest."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for demo.json and demo.md")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument(
        "--settings", default=";".join(SETTINGS), help="settings to measure, some of: " + ";".join(SETTINGS)
    )
    parser.add_argument("--run-root", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    chosen = [name for name in SETTINGS if name in arguments.settings.split(";")]
    trained = read(arguments.output)
    prepare(arguments.run_root)
    for seed in map(int, arguments.seeds.split(",")):
        for setting in chosen:
            last = train(setting, seed=seed, root=arguments.run_root)
            others = [one for one in trained if (one.setting, one.seed) != (setting, seed)]
            trained = sorted([*others, last], key=lambda one: (one.seed, list(SETTINGS).index(one.setting)))
            console.say(f"{setting}, seed {seed}: {last.validation[0][1]:.3f} -> {last.validation[-1][1]:.3f}")
            write(arguments.output, trained)
    return int(any(one.code for one in trained))


def read(folder: Path) -> list[Trained]:
    """What an earlier call measured."""
    file = folder / "demo.json"
    if not file.is_file():
        return []
    return [Trained(**one) for one in json.loads(file.read_text())["runs"]]


def prepare(root: Path) -> None:
    """Make the tiny model and its profile, which every run then finds."""
    command = [sys.executable, "-m", "appliance", "profile", RECIPE, "--set", f"cluster.run_dir={root}"]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def train(setting: str, *, seed: int, root: Path) -> Trained:
    name = f"demo-{setting.replace(', ', '-').replace(' ', '-')}-{seed}-{time.time_ns() // 1_000_000}"
    sets = (f"seed={seed}", f"cluster.run_dir={root}", *SETTINGS[setting])
    arguments = [part for pair in sets for part in ("--set", pair)]
    run_dir = (root / name).absolute()
    busy = busy_share()
    started_unix_s, started = time.time(), time.monotonic()
    command = [sys.executable, "-m", "appliance", "train", RECIPE, "--name", name, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        below = [one.pid for one in find_processes(f"{RUN_VARIABLE}={run_dir}", below=process.pid)]
        peak = max(peak, sum(map(pss_bytes, {process.pid, *below})))
        time.sleep(SAMPLE_MEMORY_EVERY_S)
    total_s = time.monotonic() - started
    if process.returncode:
        raise TrainingError(f"{setting}, seed {seed}: ended with code {process.returncode}", hint=f"see {run_dir}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    require_scheme(setting, lines=lines)
    steps = [line for line in lines if line["step"] > 0]
    return Trained(
        setting=setting,
        seed=seed,
        code=process.returncode,
        total_s=total_s,
        first_step_s=end_of_first_step(run_dir) - started_unix_s,
        step_s=median(line["step_s"] for line in steps),
        rollout_tokens_per_s=median(line["rollout_tokens_per_s"] for line in steps),
        peak_pss_bytes=peak,
        validation=tuple((line["step"], line["val_reward_mean"]) for line in lines if "val_reward_mean" in line),
        rewards=tuple(line["reward_mean"] for line in steps),
        busy=busy,
        equal_fraction=min(line["mismatch_equal_fraction"] for line in steps),
    )


def require_scheme(setting: str, *, lines: list[dict[str, Any]]) -> None:
    """Raises TrainingError where the rollouts were in another scheme than the setting is called by."""
    scheme, other = setting.partition(",")[0], {line["scheme"] for line in lines}
    if other != {scheme}:
        raise TrainingError(f"{setting}: the rollouts were in {', '.join(sorted(other))}", hint="`auto` decided so")


def end_of_first_step(run_dir: Path) -> float:
    """Unix time of the phase that follows the first weight update which follows the first policy update."""
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    phases = [event for event in events if event["kind"] == "phase"]
    names = [phase["what"] for phase in phases]
    return phases[names.index("sync", names.index("update")) + 1]["time"]


def write(folder: Path, trained: list[Trained]) -> None:
    where = here()
    document = {"schema_version": 1, **where, "recipe": RECIPE, "runs": [asdict(one) for one in trained]}
    (folder / "demo.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / "demo.md").write_text(page(trained, where=where))


def here() -> dict[str, object]:
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    if "avx2" in flags and "avx512f" not in flags:
        return f"{name}, with AVX2 alone"
    return f"{name}, {'with' if 'amx_int8' in flags else 'without'} AMX"


def mark(one: Trained) -> str:
    return "~" if one.busy > MAX_BUSY else ""


def equal(fraction: float | None) -> str:
    """Format a share of equal tokens; only all of them are 100 %."""
    if fraction is None or fraction == 1:
        return "-" if fraction is None else "100 %"
    return f"{math.floor(1000 * fraction) / 10:.1f} %"


def ends(trained: list[Trained]) -> str:
    """Name each setting with the smallest and the largest reward of its last validations."""
    texts = []
    for setting in dict.fromkeys(training.setting for training in trained):
        rewards = [training.validation[-1][1] for training in trained if training.setting == setting]
        texts.append(f"{setting} {min(rewards):.3f} to {max(rewards):.3f}")
    return "; ".join(texts)


def page(trained: list[Trained], *, where: dict[str, object]) -> str:
    rows = [
        f"| {training.setting} | {training.seed} | {training.validation[0][1]:.3f} | {training.validation[-1][1]:.3f} "
        f"| {mark(training)}{training.total_s:.0f} | {mark(training)}{training.first_step_s:.0f} "
        f"| {mark(training)}{training.step_s:.2f} "
        f"| {mark(training)}{training.rollout_tokens_per_s:.0f} "
        f"| {training.peak_pss_bytes / 1e9:.1f} | {equal(training.equal_fraction)} |"
        for training in trained
    ]
    curves = [
        f"| {training.setting} | {training.seed} | "
        + ", ".join(f"{step}: {reward:.3f}" for step, reward in training.validation)
        + " |"
        for training in trained
    ]
    return "\n".join(
        [
            "# The demo, measured",
            "",
            "What does `make demo` achieve, what does it take, and what do one flow and BF16 rollouts change?",
            f"A tiny model learns to add two-digit numbers (recipe `{RECIPE}`), once in each setting with",
            "each seed.",
            "",
            "Greedy reward at the end, smallest to largest of the seeds:",
            f"{ends(trained)}.",
            "",
            "Made by `python -m benchmarks.demo -o docs/results`; every number is in [demo.json](demo.json).",
            f"Taken on {where['date']}: {where['processor']}, {where['cores']} cores, CPython {where['python']}.",
            "The code of 2026-11-26 and that of 2026-11-30 were run in turns: [demo-turns.md](demo-turns.md).",
            "",
            "* **setting**: *int8* is the recipe as it is. In *one flow* the trainer computes in INT8, too, with a",
            "  pass of its own for the old log-probs; with *no pass* they are the rollouts'. *bf16* quantises",
            "  nothing. *learning rate 0* shows how much of a climb is learning.",
            "* **seed**: decides the order of the data and the sampling; the model is the same.",
            "* **before**, **after**: greedy reward on problems seen neither in warm start nor in training, in the",
            "  run's own scheme.",
            "* **total**, **end of step 1**: seconds from the command to the end of the run, and of its first step.",
            "  **a step**, **tokens/s** of the rollouts: medians of the steps. A time with ~ was taken while the",
            "  machine had other work, and is no measurement.",
            "* **peak PSS**: the largest sum of the proportional set sizes of all processes of the run.",
            "* **equal**: share of the tokens whose log-prob in training is the rollout's, bit for bit, in the step",
            "  with the fewest.",
            "",
            "| setting | seed | before | after | total, s | end of step 1, s | a step, s | tokens/s | peak PSS, GB "
            "| equal |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
            "## Curves: validation by step",
            "",
            "| setting | seed | step: greedy reward |",
            "| --- | --- | --- |",
            *curves,
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())

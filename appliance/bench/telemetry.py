"""What measuring costs of a step: `python -m appliance.bench.telemetry [RECIPE]`, or `--run RUN` of a run that is made.

Trains the recipe for some steps as a user does and prints both sides out of the same steps: the milliseconds that
measuring took (the mismatch in the trainer, the codes in the engines during the sync) and those of the whole step. The
first step is left out, in which much happens for the first time, and validation is no part of `step_s`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from appliance import console
from appliance.bench.demo import BUSY_SAMPLE_S, RECIPE, processor
from appliance.errors import TrainingError

STEPS = 12
AIM = 0.01  # of a step


@dataclass(frozen=True)
class Cost:
    """Medians over the steps. share: of the step, 0..1, step by step, with the least and the most."""

    steps: int
    telemetry_ms: float
    step_ms: float
    share: float
    share_min: float
    share_max: float

    @property
    def text(self) -> str:
        verdict = "below" if self.share < AIM else "not below"
        return (
            f"{self.steps} steps: measuring {self.telemetry_ms:.1f} ms, a step {self.step_ms:.0f} ms, share "
            f"{self.share:.2%} ({self.share_min:.2%} to {self.share_max:.2%}), {verdict} {AIM:.0%}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default=RECIPE)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--run-root", type=Path, default=Path("runs"))
    parser.add_argument("--run", type=Path, help="folder of a run: train nothing")
    arguments = parser.parse_args()
    busy = psutil.cpu_percent(interval=BUSY_SAMPLE_S) / 100
    run_dir = arguments.run or train(arguments.recipe, steps=arguments.steps, root=arguments.run_root.absolute())
    console.out(cost_of(run_dir).text)
    if arguments.run is None:
        where = f"{datetime.date.today().isoformat()}, {processor()}, {os.cpu_count()} cores"
        console.out(f"{where}, of which other processes used {busy:.0%} before")
    return 0


def train(recipe: str, *, steps: int, root: Path) -> Path:
    """The run's folder. Raises TrainingError when the run does not end well."""
    name = f"telemetry-{time.time_ns() // 1_000_000}"
    validated = [f"trainer.{key}" for key in ("validate_before=false", "validate_every=0", "validate_bf16_every=0")]
    sets = (f"trainer.steps={steps}", *validated, f"cluster.run_dir={root}")
    arguments = [part for each in sets for part in ("--set", each)]
    command = [sys.executable, "-m", "appliance", "train", recipe, "--name", name, *arguments]
    code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if code:
        raise TrainingError(f"{recipe}: ended with code {code}", hint=f"see {root / name}")
    return root / name


def cost_of(run_dir: Path) -> Cost:
    """Of the steps after the first. Raises TrainingError when there is none."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    pairs = [(line["telemetry_s"], line["step_s"]) for line in lines if line["step"] > 1]
    if not pairs:
        raise TrainingError(f"{run_dir} has no step after the first")
    shares = [telemetry / step for telemetry, step in pairs]
    return Cost(
        steps=len(pairs),
        telemetry_ms=median(telemetry for telemetry, _ in pairs) * 1e3,
        step_ms=median(step for _, step in pairs) * 1e3,
        share=median(shares),
        share_min=min(shares),
        share_max=max(shares),
    )


if __name__ == "__main__":
    sys.exit(main())

"""What measuring costs of a step: `python -m benchmarks.telemetry [RECIPE] [-o FOLDER]`, or `--run RUN` of a run
that is made.

Trains the recipe for some steps as a user does and prints both sides out of the same steps: the milliseconds that
measuring took (the mismatch in the trainer, the codes in the engines during the sync) and those of the whole step. The
first step is left out, in which much happens for the first time, and validation is no part of `step_s`. Into FOLDER go
`telemetry.json` (every step) and `telemetry.md`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from appliance import console
from appliance.compare.results import busy_share
from appliance.errors import TrainingError
from benchmarks.demo import MAX_BUSY, RECIPE, processor

STEPS = 12
AIM = 0.01  # of a step


@dataclass(frozen=True)
class Measured:
    """One step. telemetry_s is a part of step_s."""

    step: int
    telemetry_s: float
    step_s: float

    @property
    def share(self) -> float:
        return self.telemetry_s / self.step_s


@dataclass(frozen=True)
class Cost:
    """Of some steps, at least one: medians; the share, 0..1, is taken step by step."""

    steps: tuple[Measured, ...]

    @property
    def text(self) -> str:
        shares = [each.share for each in self.steps]
        measuring, step = median(each.telemetry_s for each in self.steps), median(each.step_s for each in self.steps)
        return (
            f"{len(shares)} steps: measuring {measuring * 1e3:.1f} ms, a step {step * 1e3:.0f} ms, share "
            f"{median(shares):.2%} ({min(shares):.2%} to {max(shares):.2%}), "
            f"{'below' if median(shares) < AIM else 'not below'} {AIM:.0%}"
        )


@dataclass(frozen=True)
class Where:
    date: str
    processor: str
    cores: int
    recipe: str
    busy: float
    """Share of all cores that other processes used just before, 0..1."""

    @classmethod
    def now(cls, recipe: str) -> Where:
        """Looks for a few seconds at what others do."""
        return cls(datetime.date.today().isoformat(), processor(), os.cpu_count() or 0, recipe, busy_share())

    @property
    def text(self) -> str:
        said = f"{self.date}: {self.processor}, {self.cores} cores, of which others used {self.busy:.0%} before"
        return said + (", so its times are no measurement" if self.busy > MAX_BUSY else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default=RECIPE)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--run-root", type=Path, default=Path("runs"))
    parser.add_argument("--run", type=Path, help="folder of a run to read, in place of a new training")
    parser.add_argument("-o", "--output", type=Path, help="folder for telemetry.json and telemetry.md")
    arguments = parser.parse_args()
    if arguments.run is not None:
        if arguments.output is not None:
            parser.error("-o: it is not known where and beside what the run of --run was made")
        console.out(cost_of(arguments.run).text)
        return 0
    where = Where.now(arguments.recipe)
    cost = cost_of(train(arguments.recipe, steps=arguments.steps, root=arguments.run_root.absolute()))
    console.out(f"{cost.text}\n{where.text}")
    if arguments.output is not None:
        write(arguments.output, cost=cost, where=where)
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
    """Compute the cost of the steps after the first. Raises TrainingError when there is none."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = tuple(Measured(line["step"], line["telemetry_s"], line["step_s"]) for line in lines if line["step"] > 1)
    if not steps:
        raise TrainingError(f"{run_dir} has no step after the first")
    return Cost(steps)


ABOUT = (
    "How much of a training step goes into measuring: the mismatch in the trainer, and what became of the codes in",
    "the engines? Both times are of the same steps. The first step is left out, in which much happens for the first",
    "time.",
)


def write(folder: Path, *, cost: Cost, where: Where) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    document = {"schema_version": 1, **asdict(where), "steps": [asdict(each) for each in cost.steps]}
    (folder / "telemetry.json").write_text(json.dumps(document, indent=1) + "\n")
    rows = [
        f"| {each.step} | {each.telemetry_s * 1e3:.1f} | {each.step_s * 1e3:.0f} | {each.share:.2%} |"
        for each in cost.steps
    ]
    lines = [
        "# What measuring costs of a step",
        "",
        *ABOUT,
        "",
        "Made by `python -m benchmarks.telemetry -o docs/results`; [telemetry.json](telemetry.json) has every number.",
        f"Taken on {where.text}.",
        "",
        f"Recipe `{where.recipe}`, medians of {cost.text}.",
        "",
        "| step | measuring, ms | step, ms | share |",
        "| --- | --- | --- | --- |",
        *rows,
    ]
    (folder / "telemetry.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())

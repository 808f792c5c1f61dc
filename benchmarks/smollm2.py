"""Rows of docs/results/smollm2.md: `python -m benchmarks.smollm2 RUN...` prints one for each run folder.

Steps, tokens and rewards do not depend on what else a host does, but on its kernels; minutes depend on both. A row
with `~` was taken while other processes worked beside the training: say so with `--loaded`.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from appliance import console
from appliance.errors import TrainingError
from appliance.record.events import MEMORY_FILE, METRICS_FILE
from appliance.report.folder import read_run

HEAD = (
    "seed",
    "rollouts",
    "steps",
    "samples",
    "tokens",
    "greedy before",
    "greedy after",
    "curve",
    "k3, median",
    "k3, most",
    "minutes",
    "memory, GB",
)
FIRST_STEPS = 20  # over which the mismatch is judged: later ones depend on what was learned


@dataclass(frozen=True)
class Row:
    """One training, as its folder has it."""

    seed: int
    scheme: str
    steps: int
    """Steps that are done."""
    planned_steps: int
    samples: int
    """Responses that were generated for training."""
    tokens: int
    """Tokens of these responses."""
    problems: int
    """Problems of the validation."""
    validation: tuple[tuple[int, float], ...]
    """(step, greedy reward)."""
    k3: tuple[float, ...]
    """Mean k3 mismatch of each step, nats a token."""
    minutes: float
    peak_bytes: int | None
    """Largest sum of proportional set sizes of all processes; None where it was not written down."""


def read_row(run_dir: Path) -> Row:
    """Raises TrainingError where the run has no step yet, RecipeError where the folder is none of a run."""
    plan, _ = read_run(run_dir)
    lines = _lines(run_dir / METRICS_FILE)
    steps = [line for line in lines if line["step"] > 0]
    if not steps:
        raise TrainingError(f"{run_dir}: it has no step", hint="give a run that trained")
    samples_of_a_step = plan.batch.prompts_per_step * plan.rollout.samples_per_prompt
    memory = _lines(run_dir / MEMORY_FILE) if (run_dir / MEMORY_FILE).is_file() else []
    return Row(
        seed=plan.seed,
        scheme="/".join(dict.fromkeys(line["scheme"] for line in steps)),
        steps=steps[-1]["step"],
        planned_steps=plan.trainer.steps,
        samples=samples_of_a_step * len(steps),
        tokens=round(sum(line["response_tokens_mean"] for line in steps) * samples_of_a_step),
        problems=next((int(line["val_samples"]) for line in lines if line.get("val_samples")), 0),
        validation=tuple(
            (line["step"], line["val_reward_mean"]) for line in lines if line.get("val_reward_mean") is not None
        ),
        k3=tuple(line["mismatch_k3_kl"] for line in steps),
        minutes=lines[-1]["time_s"] / 60,
        peak_bytes=max((sample["pss_bytes"] for sample in memory), default=None),
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def cells(row: Row, *, loaded: bool) -> tuple[str, ...]:
    """The texts below HEAD."""
    first, (last_step, last) = row.validation[0], row.validation[-1]
    before = f"{first[1]:.3f}" if first[0] == 0 else "-"
    after = f"{last:.3f}" if last_step else "-"
    k3 = row.k3[:FIRST_STEPS]
    return (
        str(row.seed),
        row.scheme,
        f"{row.steps}" if row.steps == row.planned_steps else f"{row.steps} of {row.planned_steps}",
        f"{row.samples:,}",
        f"{row.tokens:,}",
        before,
        after,
        ", ".join(f"{step}: {reward:.3f}" for step, reward in row.validation),
        f"{median(k3):.4f}",
        f"{max(k3):.4f}",
        f"{'~' if loaded else ''}{row.minutes:.0f}",
        "-" if row.peak_bytes is None else f"{row.peak_bytes / 1e9:.1f}",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's folder")
    parser.add_argument(
        "--loaded", action="store_true", help="other processes worked beside the runs: mark their minutes"
    )
    parser.add_argument("--head", action="store_true", help="print the head of the table, too")
    arguments = parser.parse_args()
    rows = [cells(read_row(run), loaded=arguments.loaded) for run in arguments.runs]
    head = [HEAD, ("---",) * len(HEAD)] if arguments.head else []
    for row in (*head, *rows):
        console.out(f"| {' | '.join(row)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())

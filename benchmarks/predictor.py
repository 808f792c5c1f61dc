"""Which number of a profile predicts the mismatch of a run better, the KL or k3: from runs that were made.

    python -m benchmarks.predictor RUN... [-o docs/results]

RUN is the folder of a run with quantised rollouts whose profile was made by itself, or of one with BF16 rollouts, which
shows what two BF16 forwards differ by. A profile has two predictions on the same tokens: `kl`, the exact KL of the
next-token distributions, and `k3_kl`, its estimate by the tokens that were drawn. What a run measures is
`mismatch_k3_kl`. A profile is of the weights at the start, so the median of the first steps counts.

A predictor that is always off by the same factor is a good one, and one whose factor varies is not. So the better one
is that whose factors, measured / predicted, vary less: by the standard deviation of their logarithms.

No training, no torch: it reads files.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from appliance import console
from appliance.errors import EngineError
from appliance.quant.files import PROFILE_FILE, Predicted, is_by_own_samples, read_file_header
from appliance.record.earlier_plans import with_keys_of_today
from benchmarks.demo import processor

FIRST_STEPS = 3


@dataclass(frozen=True)
class Comparison:
    """A run's predictions and what it measured."""

    name: str
    model: str
    """Name of a built-in model, else of the model's folder."""
    measured: float
    """Nats per token: the median k3 of its first steps."""
    predicted: Predicted | None
    """None with BF16 rollouts, for which there is no profile."""


def compare(run: Path) -> Comparison | None:
    """None for a run that measured no mismatch (one flow has none), or has quantised rollouts and no prediction. Raises
    OSError for what is not a run's folder."""
    plan = json.loads(with_keys_of_today((run / "plan.json").read_bytes()))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    k3 = [line["mismatch_k3_kl"] for line in lines if line.get("mismatch_k3_kl")][:FIRST_STEPS]
    predicted = None
    if (run / "profile" / PROFILE_FILE).is_file():
        header = read_file_header(run / "profile")
        if header["predicted"] and is_by_own_samples(header):
            predicted = Predicted(**header["predicted"])
    if not k3 or (predicted is None and plan["rollout"]["scheme"] != "bf16"):
        return None
    return Comparison(run.name, _name(plan), median(k3), predicted)


def _name(plan: dict[str, Any]) -> str:
    """The name of a plan's model. A built-in one's folder ends with a hash, also where a recipe names the folder."""
    return plan["model"]["builtin"] or re.sub(r"-[0-9a-f]{12}$", "", Path(plan["weights"]["name_or_path"]).name)


def page(comparisons: list[Comparison]) -> list[str]:
    """The table, and how much the factors of either predictor vary, of each model and of all."""
    lines = [
        "| run | model | tokens of the profile | predicted KL | predicted k3 | measured k3 | measured / KL "
        "| measured / k3 |",
        f"|{' --- |' * 8}",
    ]
    factors: dict[str, list[tuple[float, float]]] = {}
    for comparison in comparisons:
        predicted, measured = comparison.predicted, comparison.measured
        start = f"| {comparison.name} | {comparison.model} |"
        if predicted is None:
            lines.append(f"{start} BF16 | - | - | {measured:.2g} | - | - |")
            continue
        pair = measured / predicted.kl, measured / predicted.k3_kl
        factors.setdefault(comparison.model, []).append(pair)
        numbers = (f"{predicted.kl:.2g}", f"{predicted.k3_kl:.2g}", f"{measured:.2g}", *(f"{one:.2f}" for one in pair))
        lines.append(f"{start} {predicted.tokens} | {' | '.join(numbers)} |")
    lines += ["", "| runs of | number | mean factor of KL | its spread | mean factor of k3 | its spread |"]
    lines.append(f"|{' --- |' * 6}")
    every = [pair for pairs in factors.values() for pair in pairs]
    for model, pairs in (*factors.items(), ("all models", every)):
        if len(pairs) > 1:
            kl, k3 = (
                f"{mean_factor:.2f} | {spread:.2f}" for mean_factor, spread in map(_spread, zip(*pairs, strict=True))
            )
            lines.append(f"| {model} | {len(pairs)} | {kl} | {k3} |")
    return lines


def _spread(factors: Sequence[float]) -> tuple[float, float]:
    """(geometric mean, the factor of one standard deviation)."""
    logs = [math.log(factor) for factor in factors]
    return math.exp(mean(logs)), math.exp(stdev(logs))


ABOUT = (
    "Which number of a profile predicts the mismatch of a run better: the exact KL of the next-token distributions,",
    "or k3, its estimate by the tokens that were drawn? All are nats per token. *tokens of the profile* is how many",
    "both predictions are from; *measured k3* is the run's mismatch, the median of its first three steps that have",
    "one. *measured / KL* and *measured / k3* are the factors by which a prediction is too low. A prediction that is",
    "always off by the same factor is a good one; so the better one is that whose factors vary less. In the second",
    "table the factors' mean is the geometric one, and *its spread* the factor of one standard deviation.",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="+", help="folder of a run")
    parser.add_argument("-o", "--output", type=Path, help="folder for predictor.md")
    arguments = parser.parse_args()
    comparisons = []
    for run in arguments.run:
        if (comparison := compare(run)) is None:
            console.say(f"{run}: left out, for it has no prediction, or measured no mismatch")
        else:
            comparisons.append(comparison)
    if not any(comparison.predicted for comparison in comparisons):
        raise EngineError("no run has a prediction and a measurement", hint="give runs with a profile of their own")
    head = f"Made by `python -m benchmarks.predictor`. {datetime.date.today()}: {processor()}."
    text = "\n".join(["# KL or k3", "", *ABOUT, "", head, "", *page(comparisons), ""])
    console.out(text)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "predictor.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

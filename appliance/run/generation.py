"""Which engines of a run are the present ones, in `sync/engines.json`: written before they start, read by them.

No file: the first ones, as planned.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from appliance.errors import SyncError
from appliance.plan.model import ExpectedAttestation, RunPlan
from appliance.quant.precision import AS_PLANNED, Precision, quantisation_at
from appliance.run.acknowledge import SYNC_FOLDER

GENERATION_FILE = "engines.json"


@dataclass(frozen=True)
class Generation:
    """Engines that were started together. number: from 1, in an attempt.  after_sync: weight updates before them.

    precision: what they were started in.
    """

    number: int = 1
    after_sync: int = 0
    precision: Precision = AS_PLANNED

    def next(self, precision: Precision, *, after_sync: int) -> Generation:
        return Generation(self.number + 1, after_sync=after_sync, precision=precision)


def write_generation(run_dir: Path, generation: Generation) -> None:
    """Whole or not at all. Raises OSError."""
    target = run_dir / SYNC_FOLDER / GENERATION_FILE
    target.parent.mkdir(exist_ok=True)
    partial = target.with_name(f".{GENERATION_FILE}.{os.getpid()}")
    said = {
        "generation": generation.number,
        "after_sync": generation.after_sync,
        "precision": json.loads(generation.precision.to_json()),
    }
    partial.write_text(json.dumps(said) + "\n")
    partial.replace(target)


def read_generation(run_dir: Path) -> Generation:
    """Raises SyncError when the file cannot be read."""
    path = run_dir / SYNC_FOLDER / GENERATION_FILE
    try:
        raw = json.loads(path.read_text())
        precision = Precision.from_json(json.dumps(raw["precision"]))
        return Generation(int(raw["generation"]), after_sync=int(raw["after_sync"]), precision=precision)
    except FileNotFoundError:
        return Generation()
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise SyncError(f"{path}: the engines' generation cannot be read: {error}") from error


def attestations_at(plan: RunPlan, precision: Precision) -> tuple[ExpectedAttestation, ...]:
    """What the processes say when the rollout engines were started in a precision."""

    def at(expected: ExpectedAttestation) -> ExpectedAttestation:
        if expected.role != "rollout":
            return expected
        told = quantisation_at(plan.rollout.replicas[expected.rank // plan.rollout.tensor_parallel], precision)
        return replace(expected, scheme=told.scheme, emulated=told.emulated)

    return tuple(at(expected) for expected in plan.attestations)

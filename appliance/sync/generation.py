"""Which engines of a run are the present ones, in `sync/engines.json`: written before they start, read by them.

No file: the first ones, as planned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from appliance.errors import SyncError
from appliance.files import write_whole
from appliance.record.lines import STRICT, as_json, read
from appliance.record.plan import ExpectedAttestation, RunPlan
from appliance.sync.precision import AS_PLANNED, Precision, quantisation_at
from appliance.sync.records import SYNC_FOLDER

GENERATION_FILE = "engines.json"


@dataclass(frozen=True, config=STRICT)
class Generation:
    """Engines that were started together. precision: what they were started in.

    firsts: number of the first weight update of each generation of the attempt, this one's last; at least one.
    """

    precision: Precision = AS_PLANNED
    firsts: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] = (1,)

    @property
    def number(self) -> int:
        """From 1, in an attempt."""
        return len(self.firsts)

    @property
    def after_sync(self) -> int:
        """Weight updates of the attempt before these engines."""
        return self.firsts[-1] - 1

    def next(self, precision: Precision, *, after_sync: int) -> Generation:
        return Generation(precision, firsts=(*self.firsts, after_sync + 1))


def write_generation(run_dir: Path, generation: Generation) -> None:
    """Whole or not at all. Raises OSError."""
    target = run_dir / SYNC_FOLDER / GENERATION_FILE
    target.parent.mkdir(exist_ok=True)
    write_whole(target, as_json(generation) + "\n", durable=False)


def read_generation(run_dir: Path) -> Generation:
    """Raises SyncError when the file cannot be read."""
    try:
        return read(run_dir / SYNC_FOLDER / GENERATION_FILE, Generation)
    except FileNotFoundError:
        return Generation()
    except (OSError, ValueError) as error:
        raise SyncError(f"the engines' generation cannot be read: {error}") from error


def attestations_at(plan: RunPlan, precision: Precision) -> tuple[ExpectedAttestation, ...]:
    """What the processes say when the rollout engines were started in a precision."""

    def at(expected: ExpectedAttestation) -> ExpectedAttestation:
        if expected.role != "rollout":
            return expected
        told = quantisation_at(plan.rollout.replicas[expected.rank // plan.rollout.tensor_parallel], precision)
        return expected.replace(scheme=told.scheme, emulated=told.emulated)

    return tuple(at(expected) for expected in plan.attestations)

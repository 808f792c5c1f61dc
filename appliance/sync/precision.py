"""What rollouts compute in when it is not what the plan says: the guard's wish, or a validation in BF16. No torch.

It travels with every weight update that is not as planned, so that what an engine does never depends on what it did
before: an update that says nothing is as planned. The driver writes what the next update asks for to
`sync/precision.json`, and what the present engines were started in to `sync/engines.json`, before they start.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from appliance.errors import SyncError
from appliance.files import write_whole
from appliance.record.lines import STRICT, as_json, parse, read
from appliance.record.plan import ExpectedAttestation, RunPlan
from appliance.sync.records import SYNC_FOLDER
from appliance.terms.schemes import AS_PLANNED, Precision, Scheme
from appliance.terms.settings import Quantisation

_WANTED_FILE = "precision.json"
_GENERATION_FILE = "engines.json"


def quantisation_at(planned: Quantisation, precision: Precision) -> Quantisation:
    """Return the quantisation with which an engine is started that computes in `precision` from its first token on; an
    engine in BF16 stays so."""
    if not planned.scheme.quantised or precision.is_planned:
        return planned
    if precision.scheme is Scheme.BF16:
        return Quantisation(scheme=Scheme.BF16, lm_head_fp32=planned.lm_head_fp32)
    ignore = tuple(dict.fromkeys((*planned.ignore, *precision.bf16_layers)))
    return planned.replace(scheme=precision.scheme or planned.scheme, ignore=ignore)


def attestations_at(plan: RunPlan, precision: Precision) -> tuple[ExpectedAttestation, ...]:
    """Return what the processes have to attest when the rollout engines were started in a precision."""
    engines = plan.engines

    def at(expected: ExpectedAttestation) -> ExpectedAttestation:
        if expected.role != "rollout":
            return expected
        quantisation = quantisation_at(engines[plan.topology.engine_of(expected.rank)], precision)
        return expected.replace(scheme=quantisation.scheme, emulated=quantisation.emulated)

    return tuple(at(expected) for expected in plan.attestations)


def precision_of(text: str) -> Precision:
    """Read a precision: the inverse of `Precision.to_json`. Raises ValueError when the text is no precision."""
    precision = parse(text, Precision, place="not a precision")
    if left_out := {each.name for each in fields(Precision)} - json.loads(text).keys():  # nothing is planned by silence
        raise ValueError(f"not a precision: it does not say {', '.join(sorted(left_out))}")
    return precision


def write_wanted(run_dir: Path, precision: Precision) -> None:
    """Write what the next weight update asks of the engines. Without a file it is the planned precision. Raises
    OSError."""
    target = run_dir / SYNC_FOLDER / _WANTED_FILE
    if precision.is_planned:
        target.unlink(missing_ok=True)
        return
    target.parent.mkdir(exist_ok=True)
    write_whole(target, precision.to_json() + "\n", durable=False)


def read_wanted(run_dir: Path) -> Precision:
    """Read what the next weight update asks of the engines. Raises SyncError when the file cannot be read."""
    path = run_dir / SYNC_FOLDER / _WANTED_FILE
    try:
        return precision_of(path.read_text())
    except FileNotFoundError:
        return AS_PLANNED
    except (OSError, ValueError) as error:
        raise SyncError(f"{path}: the requested precision cannot be read: {error}") from error


@dataclass(frozen=True, config=STRICT)
class Generation:
    """Engines that were started together."""

    precision: Precision = AS_PLANNED
    """Precision in which the engines were started."""
    firsts: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] = (1,)
    """Numbers of the first weight update of each generation of the attempt; this generation is the last."""

    @property
    def number(self) -> int:
        """Number of the generation in the attempt, from 1."""
        return len(self.firsts)

    @property
    def after_sync(self) -> int:
        """Number of weight updates of the attempt before these engines started."""
        return self.firsts[-1] - 1

    def next(self, precision: Precision, *, after_sync: int) -> Generation:
        return Generation(precision, firsts=(*self.firsts, after_sync + 1))


def write_generation(run_dir: Path, generation: Generation) -> None:
    """Write the generation of the present engines. Raises OSError."""
    target = run_dir / SYNC_FOLDER / _GENERATION_FILE
    target.parent.mkdir(exist_ok=True)
    write_whole(target, as_json(generation) + "\n", durable=False)


def read_present(run_dir: Path) -> Precision:
    """Read what the engines compute in from the next update on: what the update asks for, or what they were started in.
    Raises SyncError."""
    told = read_wanted(run_dir)
    return read_generation(run_dir).precision if told.is_planned else told


def read_generation(run_dir: Path) -> Generation:
    """Read the generation of the present engines; without a file it is the first one. Raises SyncError when it cannot
    be read."""
    try:
        return read(run_dir / SYNC_FOLDER / _GENERATION_FILE, Generation)
    except FileNotFoundError:
        return Generation()
    except (OSError, ValueError) as error:
        raise SyncError(f"the engines' generation cannot be read: {error}") from error

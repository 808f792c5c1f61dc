"""What both ends of a weight update write down, in `sync/trainer-<replica>-<rank>.jsonl` and `sync/rollout-...`.

A line a sync. The trainer compares them with each other before it lets anything generate.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TypeVar

from pydantic.dataclasses import dataclass

from appliance.errors import SyncError
from appliance.files import write_whole
from appliance.record.events import append_line
from appliance.record.lines import STRICT, parse

SYNC_FOLDER = "sync"
_LONGEST_LINE = 4096  # bytes; an acknowledgement has some 700


@dataclass(frozen=True, config=STRICT)
class Sent:
    """Record of an update by the trainer rank that sent it."""

    sync: int
    """Number of the update, from 1."""
    replica: int
    rank: int
    manifest: str
    """Digest of the list of tensors."""
    digest_s: float


@dataclass(frozen=True, config=STRICT)
class Telemetry:
    """Effect of an update on the quantised layers of a rank; see engine/telemetry.py for how each number is
    measured."""

    codes_changed_fraction: float | None
    saturated_fraction: float
    scale_drift: float
    layer_error_max: float


@dataclass(frozen=True, config=STRICT)
class Acknowledgement:
    """Record of an update by the rollout rank that took it, written when everything in it was proven."""

    sync: int
    """Number of the update, as `Sent.sync`."""
    replica: int
    rank: int
    manifest: str
    """Digest of the manifest, as `Sent.manifest`."""
    tensors: int
    bytes: int
    """Bytes of all tensors."""
    layers: int
    layers_proven: int
    """Number of layers, of `layers`, whose kernel answered the probe as the tensor received does."""
    parameters_proven: int
    """Number of parameters that are used as they are, and are bit for bit what was received."""
    unproven: int
    """Number of tensors of which nothing but the digest is known."""
    waiting_bytes: int
    """Most bytes, as they were sent, of tensors that waited at once for the rest of their layers."""
    digest_s: float
    proof_s: float
    seconds: float
    telemetry: Telemetry | None
    """Telemetry of the update, None where nothing is quantised."""
    telemetry_s: float = 0.0
    """Seconds of `proof_s` that measuring the telemetry took."""
    scheme: str = ""
    """Scheme that the layers run from now on; `emulated` as well."""
    emulated: bool = False
    bf16_layers: int = 0
    """Number of layers that are in BF16 only for now."""
    switched: int = 0
    """Number of layers that changed with this update; all layers are then proven."""


def append_sent(run_dir: Path, sent: Sent) -> None:
    _append(lines_of_rank(run_dir, "trainer", sent.replica, sent.rank), sent)


def append_acknowledgement(run_dir: Path, taken: Acknowledgement) -> None:
    _append(lines_of_rank(run_dir, "rollout", taken.replica, taken.rank), taken)


def _append(path: Path, said: Sent | Acknowledgement) -> None:
    path.parent.mkdir(exist_ok=True)
    append_line(path, dataclasses.asdict(said))


def lines_of_rank(run_dir: Path, role: str, replica: int, rank: int) -> Path:
    """Return the file with a rank's lines. role: `trainer` or `rollout`."""
    return run_dir / SYNC_FOLDER / f"{role}-{replica}-{rank}.jsonl"


def layer_errors_file(run_dir: Path, *, replica: int, rank: int) -> Path:
    """Return the file with a rank's layer errors, a JSON object: name of a quantised layer -> the relative error of its
    weights at the last update that had it."""
    return run_dir / SYNC_FOLDER / f"layers-{replica}-{rank}.json"


def add_layer_errors(path: Path, errors: dict[str, float]) -> None:
    """Add layer errors to a file, as a whole or not at all. A layer that is not quantised at present keeps its last
    error: it may have been another engine's. Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {}
    write_whole(path, json.dumps(known | errors) + "\n", durable=False)


@dataclass(frozen=True)
class SyncRecord:
    """Records of one sync by all ranks, checked."""

    sent: tuple[Sent, ...]
    acknowledgements: tuple[Acknowledgement, ...]

    def metrics(self) -> dict[str, float | None]:
        """Return the keys of a sync in a step's line. Seconds are those of the slowest rank; digests: both ends of
        it."""
        telemetry = [one.telemetry for one in self.acknowledgements if one.telemetry is not None]
        changed = [one.codes_changed_fraction for one in telemetry if one.codes_changed_fraction is not None]
        return {
            "proof_s": round(max(one.proof_s for one in self.acknowledgements), 6),
            "telemetry_s": round(max(one.telemetry_s for one in self.acknowledgements), 6),
            "digest_s": round(sum(max(one.digest_s for one in end) for end in (self.sent, self.acknowledgements)), 6),
            "codes_changed_fraction": _mean(changed),
            "saturated_fraction": _mean([one.saturated_fraction for one in telemetry]),
            "scale_drift": _mean([one.scale_drift for one in telemetry]),
            "layer_error_max": max((one.layer_error_max for one in telemetry), default=None),
        }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def check_sync(run_dir: Path, *, sync: int, replicas: int, ranks: int, first: int = 1) -> SyncRecord:
    """Check what every rank of every replica recorded of update number `sync`, and return it.

    ranks: of one replica.  first: number of the first update that these engines take.

    Raises SyncError unless each took this very update, as its trainer rank sent it, and all were sent the same.
    """
    places = [(replica, rank) for replica in range(replicas) for rank in range(ranks)]
    sent = [_last(lines_of_rank(run_dir, "trainer", *place), kind=Sent) for place in places]
    taken = [_last(lines_of_rank(run_dir, "rollout", *place), kind=Acknowledgement) for place in places]
    manifest = next((one.manifest for one in sent if one is not None and one.sync == sync), "")
    problems_of_ranks = [
        _problem(*each, sync=sync, is_first=sync == first, manifest=manifest)
        for each in zip(places, sent, taken, strict=True)
    ]
    if problems := "; ".join(filter(None, problems_of_ranks)):
        raise SyncError(f"weight update {sync}: {problems}", hint="see sync/ in the run folder")
    return SyncRecord(sent=tuple(filter(None, sent)), acknowledgements=tuple(filter(None, taken)))


def _problem(
    place: tuple[int, int],
    sent: Sent | None,
    taken: Acknowledgement | None,
    *,
    sync: int,
    is_first: bool,
    manifest: str,
) -> str:
    who = f"rollout rank {place[1]} of replica {place[0]}"
    if sent is None or sent.sync != sync:
        return f"the trainer sent {who} {_number(sent)}"
    if taken is None or taken.sync != sync:
        return f"{who} has proven {_number(taken)}"
    if not (sent.manifest == taken.manifest == manifest):
        return (
            f"{who} took the weights {taken.manifest}, was sent {sent.manifest}, and the first rank was sent {manifest}"
        )
    if (taken.switched or is_first) and taken.layers_proven < taken.layers:
        return f"{who} has proven {taken.layers_proven} of {taken.layers} layers"
    # Some are quantised, and in any scheme lm_head's kernel at least is checked.
    return f"{who} has proven none of its layers" if taken.telemetry is not None and not taken.layers else ""


def _number(said: Sent | Acknowledgement | None) -> str:
    return "nothing yet" if said is None else f"number {said.sync} as the last one"


Line = TypeVar("Line", Sent, Acknowledgement)


def _last(path: Path, *, kind: type[Line]) -> Line | None:
    """Read the last line from the file's end alone: it grows by a line with every update, and there are two for each
    rank."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST_LINE))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return None
    if not lines:
        return None
    try:
        return parse(lines[-1], kind, place=path.name)
    except ValueError as error:
        raise SyncError(f"{error}: the last line cannot be read", hint="see sync/ in the run folder") from error

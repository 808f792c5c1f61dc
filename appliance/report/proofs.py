"""What the processes of a run wrote down about themselves, held against its plan: attestations and weight updates.

Read anew from `attest/` and `sync/`, which hold the newest attempt: a line of metrics says nothing of either.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.errors import SyncError
from appliance.plan.guard import finer_schemes
from appliance.record.attestations import Judged, judge_attestations
from appliance.record.events import Tail
from appliance.record.plan import ExpectedAttestation
from appliance.report.folder import RunView
from appliance.sync.precision import Generation, attestations_at, read_generation
from appliance.sync.records import SYNC_FOLDER
from appliance.terms.schemes import Scheme

_COUNTS = ("sync", "layers", "layers_proven", "unproven", "switched")


@dataclass(frozen=True)
class Taken:
    """An acknowledgement, as far as it is judged here; for the fields see sync/records.py."""

    sync: int
    manifest: str
    layers: int
    layers_proven: int
    unproven: int
    switched: int
    scheme: str
    emulated: bool


@dataclass(frozen=True)
class Trail:
    """Of one rank of an engine, by number of the update. sent: digest of what the trainer sent it."""

    name: str
    sent: dict[int, str]
    taken: dict[int, Taken]

    @property
    def newest(self) -> Taken | None:
        return self.taken[max(self.taken)] if self.taken else None


def read_trails(view: RunView) -> tuple[Trail, ...]:
    """One per rank of each engine of the plan, in the order of ranks; a line that cannot be read is left out."""
    rollout, folder = view.plan.rollout, view.run_dir / SYNC_FOLDER
    return tuple(
        Trail(
            name=f"rollout-{replica}-{rank}",
            sent={number: text for number, text, _ in _lines(folder / f"trainer-{replica}-{rank}.jsonl")},
            taken={
                number: taken
                for number, _, raw in _lines(folder / f"rollout-{replica}-{rank}.jsonl")
                if (taken := _taken(raw)) is not None
            },
        )
        for replica in range(len(rollout.replicas))
        for rank in range(rollout.tensor_parallel)
    )


def _lines(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(update, manifest, all)"""
    for line in Tail(path).read():
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(raw, dict) and type(raw.get("sync")) is int and isinstance(raw.get("manifest"), str):
            yield raw["sync"], raw["manifest"], raw


def _taken(raw: dict[str, Any]) -> Taken | None:
    counts = {name: raw.get(name, 0) for name in _COUNTS}
    scheme = raw.get("scheme", "")
    if any(type(count) is not int for count in counts.values()) or not isinstance(scheme, str):
        return None
    return Taken(manifest=raw["manifest"], scheme=scheme, emulated=raw.get("emulated") is True, **counts)


def engines_of(view: RunView) -> Generation:
    """The present engines; where the file cannot be read the first ones, which are held against the plan."""
    try:
        return read_generation(view.run_dir)
    except SyncError:
        return Generation()


def misses(trails: tuple[Trail, ...], *, engines: Generation, is_done: bool) -> list[str]:
    """Updates that an engine did not take as they were sent, one sentence each.

    engines: the present ones.  is_done: False where the newest update may be on its way, or was when the run ended.
    """
    newest = max((number for trail in trails for number in (*trail.sent, *trail.taken)), default=0)
    reference = {number: digest for trail in reversed(trails) for number, digest in trail.sent.items()}
    found = (
        _miss(
            trail,
            number=number,
            reference=reference.get(number, ""),
            is_first=number in engines.firsts,
            is_open=number == newest and not is_done,
        )
        for number in range(1, newest + 1)
        for trail in trails
    )
    return [each for each in found if each]


def _miss(trail: Trail, *, number: int, reference: str, is_first: bool, is_open: bool) -> str:
    sent, taken = trail.sent.get(number), trail.taken.get(number)
    if taken is None:
        return "" if is_open else f"{trail.name} did not acknowledge update {number}"
    if not (taken.manifest == sent == reference):
        return f"{trail.name} took other weights than were sent with update {number}"
    if (is_first or taken.switched) and taken.layers_proven < taken.layers:
        return f"{trail.name} proved {taken.layers_proven} of {taken.layers} layers at update {number}"
    return ""


def judge_attested(view: RunView, *, trails: tuple[Trail, ...]) -> Judged:
    """By the plan, the program that began the attempt, what the present engines were started in, and what updates
    changed an engine's precision to since."""
    started = attestations_at(view.plan, engines_of(view).precision)
    raised_to = (Scheme.BF16, *finer_schemes(view.plan))
    expected = tuple(_by_now(each, trails=trails, raised_to=raised_to) for each in started)
    return judge_attestations(
        view.run_dir, expected, pins=view.plan.pins, fingerprint=dict(view.versions).get("fingerprint", "")
    )


def _by_now(
    planned: ExpectedAttestation, *, trails: tuple[Trail, ...], raised_to: tuple[Scheme, ...]
) -> ExpectedAttestation:
    """A worker whose layers changed their precision with an update has attested anew what they run since."""
    trail = trails[planned.rank] if planned.role == "rollout" and planned.rank < len(trails) else None
    newest = trail.newest if trail is not None and any(each.switched for each in trail.taken.values()) else None
    if newest is None or newest.scheme not in raised_to:
        return planned
    return planned.replace(scheme=Scheme(newest.scheme), emulated=newest.emulated)

"""What every worker of a run says of itself, and whether it is what the plan says. Standard library only."""

from __future__ import annotations

import functools
import hashlib
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.files import write_whole

if TYPE_CHECKING:
    from appliance.plan.model import ExpectedAttestation

ATTEST_FOLDER = "attest"
SCHEMA_VERSION = 1
_PACKAGE = Path(__file__).resolve().parents[1]


@functools.cache
def fingerprint() -> str:
    """sha256 over the sources of this package, the patch records among them, and the locks where they lie beside it.

    Two processes with one fingerprint run the same program.
    """
    return fingerprint_of(_PACKAGE.parent)


def fingerprint_of(root: Path) -> str:
    """root: the folder with `appliance/` and, in a checkout and in our image, `requirements/`."""
    digest = hashlib.sha256()
    for path in (*sorted((root / _PACKAGE.name).rglob("*.py")), *sorted((root / "requirements").glob("*.txt"))):
        digest.update(str(path.relative_to(root)).encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def write_attestation(
    run_dir: Path,
    *,
    process: str,
    role: str,
    rank: int,
    scheme: str,
    emulated: bool,
    patches: Sequence[str],
    versions: Mapping[str, str],
    fingerprint: str,
    detail: Mapping[str, Any],
) -> None:
    """Write `attest/<process>.json`, whole or not at all. To `detail` it adds `node`, this host's name.

    role: `rollout`, `trainer` or `driver`.  rank: counted within the role.  detail: JSON values.  Raises OSError.
    """
    said = {
        "schema_version": SCHEMA_VERSION,
        "process": process,
        "role": role,
        "rank": rank,
        "scheme": str(scheme),
        "emulated": emulated,
        "patches": list(patches),
        "versions": dict(versions),
        "fingerprint": fingerprint,
        "detail": {"node": socket.gethostname(), **detail},
    }
    target = run_dir / ATTEST_FOLDER / f"{process}.json"
    target.parent.mkdir(exist_ok=True)
    write_whole(target, json.dumps(said, indent=2) + "\n", durable=False)


@dataclass(frozen=True)
class Judged:
    """Of all attestations of a run, one sentence each. missing: who said nothing.  wrong: who is not as planned."""

    unreadable: tuple[str, ...]
    missing: tuple[str, ...]
    wrong: tuple[str, ...]


def set_attestations_aside(run_dir: Path, *, role: str, name: str) -> None:
    """Move what processes of a role said to `attest/<name>/`: they are gone, others are to speak. Raises OSError."""
    folder = run_dir / ATTEST_FOLDER
    said = sorted(folder.glob(f"{role}-*.json"))
    (folder / name).mkdir(parents=True, exist_ok=True)
    for path in said:
        path.replace(folder / name / path.name)


def check_attestations(
    run_dir: Path,
    expected: tuple[ExpectedAttestation, ...],
    *,
    pins: tuple[tuple[str, str], ...],
    fingerprint: str,
) -> list[str]:
    """What is missing or otherwise than planned, one sentence each; empty when every process said what it should.

    pins: (distribution, version).  fingerprint: of the process that asks.
    """
    found = judge_attestations(run_dir, expected, pins=pins, fingerprint=fingerprint)
    return [*found.unreadable, *found.missing, *found.wrong]


def judge_attestations(
    run_dir: Path,
    expected: tuple[ExpectedAttestation, ...],
    *,
    pins: tuple[tuple[str, str], ...],
    fingerprint: str,
) -> Judged:
    """`check_attestations`, its findings by their kind."""
    said, problems = _read(run_dir / ATTEST_FOLDER)
    wanted = {(one.role, one.rank): one for one in expected}
    heard = {(one["role"], one["rank"]) for one in said}
    wrong: list[str] = []
    for one in said:
        wrong += _differences(one, wanted.get((one["role"], one["rank"])), pins=pins, fingerprint=fingerprint)
    missing = (f"{role} rank {rank} did not say what it runs" for role, rank in sorted(wanted.keys() - heard))
    return Judged(tuple(problems), tuple(missing), tuple(wrong))


def _read(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    said, problems = [], []
    for path in sorted(folder.glob("[!.]*.json")):
        try:
            raw = json.loads(path.read_text())
        except (ValueError, OSError, RecursionError) as error:
            problems.append(f"{path.name} cannot be read: {error}")
            continue
        if not _is_attestation(raw):
            problems.append(f"{path.name} is not an attestation of schema_version {SCHEMA_VERSION}")
            continue
        said.append(raw)
    return said, problems


def _is_attestation(raw: object) -> bool:
    """Of the kinds that `write_attestation` writes, where a judgement rests on them."""
    return (
        isinstance(raw, dict)
        and raw.get("schema_version") == SCHEMA_VERSION
        and isinstance(raw.get("role"), str)
        and isinstance(raw.get("rank"), int)
        and isinstance(raw.get("versions"), dict)
        and isinstance(raw.get("patches"), list)
        and all(isinstance(name, str) for name in raw["patches"])
    )


def _differences(
    said: dict[str, Any],
    wanted: ExpectedAttestation | None,
    *,
    pins: tuple[tuple[str, str], ...],
    fingerprint: str,
) -> Iterator[str]:
    process = said.get("process")
    if wanted is None:
        yield f"{process} ({said.get('role')} rank {said.get('rank')}) is not in the plan"
        return
    if said.get("scheme") != str(wanted.scheme):
        yield f"{process} runs {said.get('scheme')}, the plan says {wanted.scheme}"
    if said.get("emulated") is not wanted.emulated:
        yield f"{process} says emulated is {said.get('emulated')}, the plan says {wanted.emulated}"
    if said["patches"] != list(wanted.patches):
        live, planned = (", ".join(names) or "none" for names in (said["patches"], wanted.patches))
        yield f"{process} has the patches {live}; the plan says {planned}"
    versions = said["versions"]
    for name, version in pins:
        if name not in versions:
            yield f"{process} does not say its version of {name}, the plan says {version}"
        elif versions[name] != version:
            yield f"{process} has {name} {versions[name]}, the plan says {version}"
    if said.get("fingerprint") != fingerprint:
        yield f"{process} runs other sources of this program than the process that asks"

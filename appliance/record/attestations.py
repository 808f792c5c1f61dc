"""Attestations: what every worker of a run reports that it runs, and whether that is what the plan says."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import socket
from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic.dataclasses import dataclass

from appliance.files import write_whole
from appliance.record.lines import STRICT, as_json, parse

if TYPE_CHECKING:
    from appliance.record.plan import ExpectedAttestation

ATTEST_FOLDER = "attest"
_PACKAGE = Path(__file__).resolve().parents[1]


@functools.cache
def fingerprint() -> str:
    """Hash (sha256) the sources of this package, the patch records among them, and the locks where they lie beside it.
    Two processes with one fingerprint run the same program."""
    return fingerprint_of(_PACKAGE.parent)


def fingerprint_of(root: Path) -> str:
    """Hash the sources below a folder. root: the folder with `appliance/` and, in a checkout and in our image,
    `requirements/`."""
    digest = hashlib.sha256()
    for path in (*sorted((root / _PACKAGE.name).rglob("*.py")), *sorted((root / "requirements").glob("*.txt"))):
        digest.update(str(path.relative_to(root)).encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def version_of(distribution: str) -> str:
    """Return the installed version of a distribution; empty where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True, config=STRICT)
class Attestation:
    """Report of one process: what it runs."""

    process: str
    role: str
    """Role of the process: `rollout`, `trainer` or `driver`."""
    rank: int
    """Number of the process within its role."""
    scheme: str
    emulated: bool
    patches: tuple[str, ...]
    """Names of the patches, in the order in which they were applied."""
    versions: dict[str, str]
    """Version of each distribution."""
    fingerprint: str
    detail: dict[str, Any] = field(default_factory=dict)
    """JSON values that differ by role."""
    schema_version: Literal[1] = 1


def write_attestation(run_dir: Path, attestation: Attestation) -> None:
    """Write `attest/<process>.json`. To `detail` it adds `node`, this host's name. Raises OSError."""
    folder = run_dir / ATTEST_FOLDER
    folder.mkdir(exist_ok=True)
    attestation = replace(attestation, detail={"node": socket.gethostname(), **attestation.detail})
    write_whole(folder / f"{attestation.process}.json", as_json(attestation, indent=2) + "\n", durable=False)


def read_attestations(run_dir: Path) -> tuple[list[Attestation], list[str]]:
    """Read the attestations of the processes that run now, and a sentence about each file that is none."""
    attestations, problems = [], []
    for path in sorted((run_dir / ATTEST_FOLDER).glob("[!.]*.json")):
        try:
            attestations.append(parse(path.read_text(), Attestation, place=f"{path.name} is no attestation"))
        except OSError as error:
            problems.append(f"{path.name} cannot be read: {error}")
        except ValueError as error:
            problems.append(str(error))
    return attestations, problems


@dataclass(frozen=True)
class AttestationCheck:
    """Problems of all attestations of a run, one sentence each."""

    unreadable: list[str]
    missing: list[str]
    """Processes of the plan that did not attest."""
    wrong: list[str]
    """Processes that do not run what the plan says."""

    @property
    def problems(self) -> list[str]:
        """All problems; empty when every process attested what the plan says."""
        return [*self.unreadable, *self.missing, *self.wrong]


def set_attestations_aside(run_dir: Path, *, role: str, name: str) -> None:
    """Move the attestations of a role to `attest/<name>/`: those processes are gone, and others will attest. Raises
    OSError."""
    folder = run_dir / ATTEST_FOLDER
    files = sorted(folder.glob(f"{role}-*.json"))
    (folder / name).mkdir(parents=True, exist_ok=True)
    for path in files:
        path.replace(folder / name / path.name)


def check_attestations(
    run_dir: Path, expected: Sequence[ExpectedAttestation], *, pins: Sequence[tuple[str, str]], fingerprint: str
) -> AttestationCheck:
    """Compare a run's attestations with the plan. pins: (distribution, version).  fingerprint: of the program that is
    to run."""
    attestations, unreadable = read_attestations(run_dir)
    expected_by_place = {(expectation.role, expectation.rank): expectation for expectation in expected}
    attested = {(attestation.role, attestation.rank) for attestation in attestations}
    missing = [
        f"{role} rank {rank} did not report what it runs" for role, rank in sorted(expected_by_place.keys() - attested)
    ]
    wrong = [
        difference
        for live in attestations
        for difference in _differences(
            live, expected_by_place.get((live.role, live.rank)), pins=pins, fingerprint=fingerprint
        )
    ]
    return AttestationCheck(unreadable, missing, wrong)


def _differences(
    live: Attestation, expected: ExpectedAttestation | None, *, pins: Sequence[tuple[str, str]], fingerprint: str
) -> Iterator[str]:
    process = live.process
    if expected is None:
        yield f"{process} ({live.role} rank {live.rank}) is not in the plan"
        return
    if live.scheme != str(expected.scheme):
        yield f"{process} runs {live.scheme}, the plan says {expected.scheme}"
    if live.emulated != expected.emulated:
        yield f"{process} reports emulated: {live.emulated}, the plan says {expected.emulated}"
    if live.patches != tuple(expected.patches):
        applied, planned = (", ".join(names) or "none" for names in (live.patches, expected.patches))
        yield f"{process} has the patches {applied}; the plan says {planned}"
    for name, version in pins:
        if name not in live.versions:
            yield f"{process} does not report its version of {name}, the plan says {version}"
        elif live.versions[name] != version:
            yield f"{process} has {name} {live.versions[name]}, the plan says {version}"
    if live.fingerprint != fingerprint:
        yield f"{process} runs other sources of this program than the process that checks it"

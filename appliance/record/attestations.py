"""What every worker of a run says of itself, and whether it is what the plan says."""

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
    """sha256 over the sources of this package, the patch records among them, and the locks where they lie beside it.
    Two processes with one fingerprint run the same program."""
    return fingerprint_of(_PACKAGE.parent)


def fingerprint_of(root: Path) -> str:
    """root: the folder with `appliance/` and, in a checkout and in our image, `requirements/`."""
    digest = hashlib.sha256()
    for path in (*sorted((root / _PACKAGE.name).rglob("*.py")), *sorted((root / "requirements").glob("*.txt"))):
        digest.update(str(path.relative_to(root)).encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def version_of(distribution: str) -> str:
    """As it is installed; empty where it is not."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True, config=STRICT)
class Attestation:
    """What one process says it runs."""

    process: str
    role: str
    """`rollout`, `trainer` or `driver`."""
    rank: int
    """Counted within the role."""
    scheme: str
    emulated: bool
    patches: tuple[str, ...]
    """Names, in the order in which they were applied."""
    versions: dict[str, str]
    """By distribution."""
    fingerprint: str
    detail: dict[str, Any] = field(default_factory=dict)
    """JSON values, other ones for each role."""
    schema_version: Literal[1] = 1


def write_attestation(run_dir: Path, said: Attestation) -> None:
    """Write `attest/<process>.json`. To `detail` it adds `node`, this host's name. Raises OSError."""
    folder = run_dir / ATTEST_FOLDER
    folder.mkdir(exist_ok=True)
    said = replace(said, detail={"node": socket.gethostname(), **said.detail})
    write_whole(folder / f"{said.process}.json", as_json(said, indent=2) + "\n", durable=False)


def read_attestations(run_dir: Path) -> tuple[list[Attestation], list[str]]:
    """Of the processes that run now, and a sentence about each file that is none."""
    said, problems = [], []
    for path in sorted((run_dir / ATTEST_FOLDER).glob("[!.]*.json")):
        try:
            said.append(parse(path.read_text(), Attestation, place=f"{path.name} is no attestation"))
        except OSError as error:
            problems.append(f"{path.name} cannot be read: {error}")
        except ValueError as error:
            problems.append(str(error))
    return said, problems


@dataclass(frozen=True)
class AttestationCheck:
    """Of all attestations of a run, one sentence each."""

    unreadable: list[str]
    missing: list[str]
    """Who said nothing."""
    wrong: list[str]
    """Who is not as planned."""

    @property
    def problems(self) -> list[str]:
        """Empty when every process said what it should."""
        return [*self.unreadable, *self.missing, *self.wrong]


def set_attestations_aside(run_dir: Path, *, role: str, name: str) -> None:
    """Move what processes of a role said to `attest/<name>/`: they are gone, others are to speak. Raises OSError."""
    folder = run_dir / ATTEST_FOLDER
    said = sorted(folder.glob(f"{role}-*.json"))
    (folder / name).mkdir(parents=True, exist_ok=True)
    for path in said:
        path.replace(folder / name / path.name)


def check_attestations(
    run_dir: Path, expected: Sequence[ExpectedAttestation], *, pins: Sequence[tuple[str, str]], fingerprint: str
) -> AttestationCheck:
    """pins: (distribution, version).  fingerprint: of the program that is to run."""
    said, unreadable = read_attestations(run_dir)
    wanted = {(one.role, one.rank): one for one in expected}
    heard = {(one.role, one.rank) for one in said}
    missing = [f"{role} rank {rank} did not say what it runs" for role, rank in sorted(wanted.keys() - heard)]
    wrong = [
        difference
        for one in said
        for difference in _differences(one, wanted.get((one.role, one.rank)), pins=pins, fingerprint=fingerprint)
    ]
    return AttestationCheck(unreadable, missing, wrong)


def _differences(
    said: Attestation, wanted: ExpectedAttestation | None, *, pins: Sequence[tuple[str, str]], fingerprint: str
) -> Iterator[str]:
    process = said.process
    if wanted is None:
        yield f"{process} ({said.role} rank {said.rank}) is not in the plan"
        return
    if said.scheme != str(wanted.scheme):
        yield f"{process} runs {said.scheme}, the plan says {wanted.scheme}"
    if said.emulated != wanted.emulated:
        yield f"{process} says emulated is {said.emulated}, the plan says {wanted.emulated}"
    if said.patches != tuple(wanted.patches):
        live, planned = (", ".join(names) or "none" for names in (said.patches, wanted.patches))
        yield f"{process} has the patches {live}; the plan says {planned}"
    for name, version in pins:
        if name not in said.versions:
            yield f"{process} does not say its version of {name}, the plan says {version}"
        elif said.versions[name] != version:
            yield f"{process} has {name} {said.versions[name]}, the plan says {version}"
    if said.fingerprint != fingerprint:
        yield f"{process} runs other sources of this program than the process that asks"

"""What each node of a cluster says of itself, and whether they can train together. Standard library only.

Ray compares nothing but its own version. Nodes with other sources, another Python, another model or another file system
would fail late, or would not fail at all.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.plan.model import RunPlan
from appliance.quant.device import why_not
from appliance.run.attest import fingerprint

CANARY_FILE = ".canary"
_NOTHING = ""


@dataclass(frozen=True)
class NodeQuestion:
    """What a node is asked. canary: a file that the head wrote into the run's folder.  model: a folder, or empty."""

    canary: str
    model: str
    distributions: tuple[str, ...]


@dataclass(frozen=True)
class NodeReport:
    """The answer. name: the host's.  canary, model: what it read there (model: hash of config.json), or empty.

    cpu_flags: as in /proc/cpuinfo.  versions: (distribution, version or empty).
    """

    name: str
    python: str
    fingerprint: str
    versions: tuple[tuple[str, str], ...]
    canary: str
    model: str
    cpu_flags: frozenset[str]


def plant_canary(run_dir: Path) -> str:
    """Write a word that nobody can guess into the run's folder, for every node to read. Raises OSError."""
    word = secrets.token_hex(16)
    (run_dir / CANARY_FILE).write_text(word)
    return word


def question_of(plan: RunPlan) -> NodeQuestion:
    return NodeQuestion(
        canary=str(Path(plan.run_dir) / CANARY_FILE),
        model=plan.model.path if plan.model.path.startswith("/") else _NOTHING,
        distributions=tuple(name for name, _ in plan.pins),
    )


def describe_node(question: NodeQuestion) -> NodeReport:
    """Run on each node, in a process of Ray's."""
    config = Path(question.model) / "config.json" if question.model else None
    return NodeReport(
        name=socket.gethostname(),
        python=platform.python_version(),
        fingerprint=fingerprint(),
        versions=tuple((name, _version(name)) for name in question.distributions),
        canary=_read(Path(question.canary)),
        model=hashlib.sha256(_read(config).encode()).hexdigest() if config and _read(config) else _NOTHING,
        cpu_flags=_cpu_flags(),
    )


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return _NOTHING


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return _NOTHING


def _cpu_flags() -> frozenset[str]:
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset())


def differences(reports: Sequence[NodeReport], *, head: NodeReport, plan: RunPlan, canary: str) -> list[str]:
    """Why these nodes cannot train together: a sentence each, beginning with the node's name. head: this host's."""
    problems = []
    for report in reports:
        problems += [f"{report.name}: {problem}" for problem in _problems(report, head=head, plan=plan, canary=canary)]
    return problems


def _problems(report: NodeReport, *, head: NodeReport, plan: RunPlan, canary: str) -> list[str]:
    found = []
    if report.fingerprint != head.fingerprint:
        found.append(f"runs other sources or locks than the head ({report.fingerprint[:12]}, {head.fingerprint[:12]})")
    if report.python != head.python:
        found.append(f"has Python {report.python}, the head {head.python}")
    others = dict(head.versions)
    found += [
        f"has {name} {version or 'not installed'}, the head {others[name]}"
        for name, version in report.versions
        if version != others[name]
    ]
    if report.canary != canary:
        found.append(f"does not see {plan.run_dir}: cluster.run_dir must be on a file system that all nodes share")
    if report.model != head.model:
        found.append(f"sees another model in {plan.model.path}" if report.model else f"does not see {plan.model.path}")
    for scheme in dict.fromkeys(each.scheme for each in plan.rollout.replicas if not each.emulated):
        if reason := why_not(scheme, device=plan.device, cpu_flags=report.cpu_flags):
            found.append(f"cannot run `{scheme}`: {reason}")
    return found


def host_of(address: str) -> str:
    """Of `host:port`, IPv6 in brackets."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"`{address}` is not host:port")
    return host.strip("[]")

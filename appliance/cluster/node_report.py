"""What each node of a cluster reports about itself, and whether the nodes can train together.

Ray compares nothing but its own version. Nodes with other sources, another Python, other GPUs, another model or another
file system would fail late, or would not fail at all. And each is judged as `check` judges the head's host.

A node in turn learns where the run is that it works for, and from there how it ended: a head that ended its training
and one that was killed look the same on the network. The run's folder is on a file system that every node shares.
"""

from __future__ import annotations

import os
import platform
import secrets
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pydantic.dataclasses

from appliance import hub
from appliance.files import digest_of, write_whole
from appliance.finding import Severity
from appliance.plan.host import HostFacts
from appliance.preflight.checks import judge_node
from appliance.preflight.inputs import read_stack
from appliance.preflight.probes import read_host
from appliance.quant.headers import damage
from appliance.record.attestations import fingerprint, version_of
from appliance.record.lines import STRICT, as_json, read
from appliance.record.plan import RunPlan
from appliance.record.session import RunRecord, RunStatus, read_record
from appliance.terms.counts import counted
from appliance.terms.devices import why_not
from appliance.terms.environment import NODE_VARIABLE, THREADS_VARIABLE
from appliance.terms.shapes import ModelShape

CANARY_FILE = ".canary"
PLAN_FILE = "plan.json"
NOTICE_FILE = "training.json"
_MIB = 1 << 20
_ALIKE_PERCENT = 98  # of the head's GPU memory: drivers and ECC take some of it, not the same everywhere
_SHOWN = 12  # characters of a hash


@dataclass(frozen=True)
class NodeReport:
    """Report of a node about itself."""

    name: str
    """Name of the host."""
    python: str
    fingerprint: str
    versions: tuple[tuple[str, str], ...]
    """Versions that are installed: (distribution, version or empty)."""
    canary: str
    """Text that the node read from the canary file, or empty."""
    plan: str
    """Hash of the run's plan.json, or empty."""
    model: str
    """Hash of the folder's config.json, or the commit on the hub that loading would take, or empty."""
    model_problem: str
    """Reason why `model` is empty, or what the model's folder lacks."""
    facts: HostFacts
    """Facts of the host."""
    patches: tuple[tuple[str, str], ...] = ()
    """Patches that cannot be applied there: (name, reason)."""


def plant_canary(run_dir: Path) -> str:
    """Write a word that nobody can guess into the run's folder, for every node to read. Raises OSError."""
    word = secrets.token_hex(16)
    (run_dir / CANARY_FILE).write_text(word)
    return word


def describe_node(plan: RunPlan) -> NodeReport:
    """Run on each node, in a process of Ray's. The node's `join` learns there what its node is for."""
    run_dir = Path(plan.run_dir)
    write_notice(run_dir)
    model, model_problem = _model_seen(plan.weights.name_or_path)
    return NodeReport(
        name=socket.gethostname(),
        python=platform.python_version(),
        fingerprint=fingerprint(),
        versions=tuple((name, version_of(name)) for name, _ in plan.pins),
        canary=_read(run_dir / CANARY_FILE),
        plan=digest_of(run_dir / PLAN_FILE),
        model=model,
        model_problem=model_problem,
        facts=read_host(run_dir),
        patches=read_stack(plan).patches,
    )


def _model_seen(model: str) -> tuple[str, str]:
    """Return (what tells it from others, why there is nothing)."""
    if not model.startswith("/"):
        return hub.revision(model)
    folder = Path(model)
    seen = digest_of(folder / "config.json")
    if not seen:
        return "", "no such folder, or without config.json"
    parts = hub.missing_parts(folder)
    return seen, "; ".join(([f"it has no {' and no '.join(parts)}"] if parts else []) + list(damage(folder).problems))


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def list_differences(
    reports: Sequence[NodeReport], *, head: NodeReport, plan: RunPlan, canary: str, shape: ModelShape | None = None
) -> list[str]:
    """List the reasons why these nodes cannot train together: a sentence each, beginning with the node's name. head:
    this host's. shape: of the model, where it is known."""
    problems = []
    for report in reports:
        differs = _differences_from_head(report, head=head, plan=plan, canary=canary)
        errors = _findings_of_preflight(report, plan, shape, Severity.ERROR)
        problems += [f"{report.name}: {problem}" for problem in (*differs, *errors)]
    return problems


def list_warnings(
    reports: Sequence[NodeReport], *, head: NodeReport, plan: RunPlan, shape: ModelShape | None = None
) -> list[str]:
    """List what other hosts than the head's are warned of: what preflight finds there (the head's own findings were
    shown before), and that they have fewer cores than the plan's threads."""
    return [
        f"{report.name}: {warning}"
        for report in reports
        if report.name != head.name
        for warning in (*_findings_of_preflight(report, plan, shape, Severity.WARNING), *_fewer_cores(report, plan))
    ]


def _fewer_cores(report: NodeReport, plan: RunPlan) -> Iterator[str]:
    """Warn of fewer cores: on a CPU every node gets the plan's number, from the head's cores; trainer/worker.py lowers
    it there."""
    threads = int(dict(plan.env).get(THREADS_VARIABLE, "0"))
    if report.facts.cores < threads:
        cores = counted(report.facts.cores, "core")
        yield f"has {cores}: a process there takes as many threads, not the plan's {threads}"


def _findings_of_preflight(
    report: NodeReport, plan: RunPlan, shape: ModelShape | None, severity: Severity
) -> Iterator[str]:
    for finding in judge_node(plan, report.facts, shape):
        if finding.severity is severity:
            yield f"{finding.place}: {finding.message}"


def _differences_from_head(report: NodeReport, *, head: NodeReport, plan: RunPlan, canary: str) -> Iterator[str]:
    if report.fingerprint != head.fingerprint:
        yield f"runs other sources or locks than the head ({report.fingerprint[:_SHOWN]}, {head.fingerprint[:_SHOWN]})"
    if report.python != head.python:
        yield f"has Python {report.python}, the head {head.python}"
    others = dict(head.versions)
    for name, version in report.versions:
        if version != others[name]:
            yield f"has {name} {version or 'not installed'}, the head {others[name]}"
    if report.canary != canary:
        yield f"does not see {plan.run_dir}: cluster.run_dir must be on a file system that all nodes share"
    elif report.plan != head.plan:
        yield f"sees another {PLAN_FILE} in {plan.run_dir}: does its file system keep old files?"
    yield from _model_problems(report, head=head, model=plan.weights.name_or_path)
    yield from _device_problems(report, head=head, plan=plan)
    for name, why in report.patches if report.versions == head.versions else ():  # another version has other sources
        yield f"patch {name}: {why}"


def _model_problems(report: NodeReport, *, head: NodeReport, model: str) -> Iterator[str]:
    if not report.model:
        yield f"does not see {model}: {report.model_problem}"
    elif report.model != head.model and model.startswith("/"):
        yield f"sees another model in {model}"
    elif report.model != head.model:
        yield f"would load {model} at {report.model[:_SHOWN]}, the head at {head.model[:_SHOWN] or 'no revision'}"
    elif report.model_problem:
        yield f"{model}: {report.model_problem}"


def _device_problems(report: NodeReport, *, head: NodeReport, plan: RunPlan) -> Iterator[str]:
    """Report what is missing of the GPUs: a scheme needs its kernels, and the plan its GPUs: as many, of that kind,
    with memory like the head's."""
    for scheme in dict.fromkeys(engine.scheme for engine in plan.engines if not engine.emulated):
        if reason := why_not(scheme, device=plan.cluster.device, cpu_flags=report.facts.cpu_flags):
            yield f"cannot run `{scheme}`: {reason}"
    if plan.is_cpu:
        return
    fitting, of_the_head = (
        [gpu.memory_bytes for gpu in node.facts.gpus_of(plan.cluster.device)] for node in (report, head)
    )
    if len(fitting) < plan.cluster.gpus_per_node:
        have = ", ".join(each.product for each in report.facts.gpus) or "none"
        yield f"has {have}, the plan wants {plan.cluster.gpus_per_node} x `{plan.cluster.device}`"
    elif of_the_head and min(fitting) * 100 < min(of_the_head) * _ALIKE_PERCENT:
        yield f"has GPUs of {min(fitting) // _MIB} MiB, the head of {min(of_the_head) // _MIB}"


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class RunNotice:
    run_dir: Path
    attempt: int
    """Attempt of the run in which this node became part of it."""


def write_notice(run_dir: Path) -> None:
    """Write for `join`, on a node and in a process of Ray's, what its node is for. Elsewhere, and without a run there:
    nothing. Raises OSError when it cannot be written."""
    folder, record = os.environ.get(NODE_VARIABLE), read_run_record(run_dir)
    if folder and record is not None:
        write_whole(Path(folder) / NOTICE_FILE, as_json(RunNotice(run_dir, record.attempt)), durable=False)


def read_notice(folder: Path) -> RunNotice | None:
    """Read the notice; None before there is one. Raises OSError, ValueError."""
    file = folder / NOTICE_FILE
    return read(file, RunNotice) if file.exists() else None


def read_run_record(run_dir: Path) -> RunRecord | None:
    """Read the run's run.json; None where there is none, or it cannot be read just now."""
    try:
        return read_record(run_dir)
    except (OSError, ValueError):
        return None


def read_end(training: RunNotice) -> RunRecord | None:
    """Read how that attempt ended, None while it runs, and when nobody has written it."""
    record = read_run_record(training.run_dir)
    if record is None or record.attempt != training.attempt or record.state in (RunStatus.STARTING, RunStatus.RUNNING):
        return None
    return record


def is_resumed(training: RunNotice) -> bool:
    """Tell whether the run has a newer attempt than the one that this node was part of."""
    record = read_run_record(training.run_dir)
    return record is not None and record.attempt > training.attempt

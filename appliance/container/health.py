"""`appliance health`: what a container's health check asks. It follows the run that this container is at.

The run is found by the mark that its processes carry, so it does not matter where its folder lies. Before the run has
processes (preflight) a container is healthy; after the run it is gone. A node that joined has the folder of its `join`
for a mark, and no run.json there: its run is the one that it works for, whose launcher is on another host.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from appliance.cluster.node_report import read_notice
from appliance.record.session import RunRecord, RunStatus, has_launcher, read_record
from appliance.report.display import phase_text
from appliance.terms.environment import NODE_VARIABLE, RUN_VARIABLE

QUIET_S = 1800.0  # the guard's own watch over a stalled run is narrower; this is for a launcher that hangs with it
_TOLD_IN = ("events.jsonl", "metrics.jsonl", "logs/*/*.log")


@dataclass(frozen=True)
class ContainerHealth:
    is_healthy: bool
    text: str
    """Description for `docker inspect`, one line."""


def look_at_container(proc: Path = Path("/proc")) -> ContainerHealth:
    """Judge the health of this container's run or node, or of the worst one where there are several."""
    runs, nodes = find_marked_folders(proc)
    judged = [*(_of_run(folder) for folder in runs), *(_of_node(folder) for folder in nodes)]
    return min(judged, key=lambda each: each.is_healthy, default=ContainerHealth(True, "no run yet"))


def find_marked_folders(proc: Path) -> tuple[list[Path], list[Path]]:
    """Find the folders of the runs, and of the joined nodes, whose processes live here. proc: as /proc."""
    runs, nodes = set(), set()
    for file in proc.glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # gone, or somebody else's
            pairs = (os.fsdecode(entry).partition("=") for entry in file.read_bytes().split(b"\0"))
            environment = {name: value for name, _, value in pairs}
            if node := environment.get(NODE_VARIABLE):  # its workers have the mark of a run that is not of this host
                nodes.add(Path(node))
            elif run := environment.get(RUN_VARIABLE):
                runs.add(Path(run))
    # A process with its own title may have lost its node, and have the run's mark alone.
    of_nodes = nodes | set(filter(None, map(_work_of, nodes)))
    return sorted(runs - of_nodes), sorted(nodes)


def _work_of(node: Path) -> Path | None:
    """Return the folder of the run that a node works for. `_of_node` says what is wrong where it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        training = read_notice(node)
        return None if training is None else training.run_dir
    return None


def _of_node(folder: Path) -> ContainerHealth:
    try:
        training = read_notice(folder)
        if training is None:
            return ContainerHealth(True, "a node that has no training yet")
        run_dir = training.run_dir
        record = read_record(run_dir)
    except (OSError, ValueError) as error:
        return ContainerHealth(False, f"node {folder}: {error}")
    found = judge_run(run_dir.name, record, launched=True, quiet_s=time.time() - _last_word(run_dir))
    return ContainerHealth(found.is_healthy, f"node of {found.text}")


def _of_run(run_dir: Path) -> ContainerHealth:
    try:
        record = read_record(run_dir)
    except (OSError, ValueError) as error:
        return ContainerHealth(False, f"{run_dir}: {error}")
    return judge_run(run_dir.name, record, launched=has_launcher(run_dir), quiet_s=time.time() - _last_word(run_dir))


def judge_run(name: str, record: RunRecord, *, launched: bool, quiet_s: float) -> ContainerHealth:
    """Judge a run. launched: whether its launcher lives.  quiet_s: seconds since a process of the run wrote
    anything."""
    where = f"{name}: attempt {record.attempt}, {phase_text(record.phase)}"
    if record.state in (RunStatus.FAILED, RunStatus.STOPPED):
        return ContainerHealth(False, f"{name}: {record.state}: {record.reason}")
    if record.state is not RunStatus.DONE and not launched:
        return ContainerHealth(False, f"{where}: its launcher is gone")
    if quiet_s > QUIET_S:
        return ContainerHealth(False, f"{where}: nothing new for {quiet_s / 60:.0f} minutes")
    return ContainerHealth(True, where)


def _last_word(run_dir: Path) -> float:
    """Unix s."""
    files = [file for pattern in _TOLD_IN for file in run_dir.glob(pattern)]
    return max((file.stat().st_mtime for file in files), default=run_dir.stat().st_mtime)

"""The process of one row, watched: a time limit, the stacks of all threads before it is ended, and nothing left of it.

A row whose process was lost in one of its parts continues in a new one with the parts that did not run.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from appliance import console
from appliance.files import write_whole
from appliance.processes import Process, end_processes, find_processes, module_argv
from appliance.record.liveness import STACKS_FOLDER, dump_stacks
from appliance.signals import Interrupts
from appliance.terms.environment import (
    LOG_DIR_VARIABLE,
    PLAN_VARIABLE,
    PLATFORM_VARIABLE,
    RAY_DIR_VARIABLE,
    child_env,
)
from benchmarks.accept.child import LOST
from benchmarks.accept.outcome import LOG, OUTCOME, Outcome, State, read_outcome
from benchmarks.accept.probe import HIDDEN, import_path
from benchmarks.accept.rows import Row

MARK = "APPLIANCE_ACCEPT"  # of all processes of a row; its value is the row's folder
LOOK_EVERY_S = 1.0  # at a row's processes, and at what it has found
PATIENCE_S = 20.0  # after SIGTERM: a training that is ended ends its Ray
KEPT = "kept"  # of a row's folder, what is not a model
KEPT_BYTES = 2 << 20  # of a file, its end
KEPT_FILES = 200
OVER = "the time of --within was over"  # with a row that was not done
# Of a training, by its run folder, and the stacks of what hung.
_WANTED = (
    *("plan.json", "run.json", "versions.json", "events.jsonl", "metrics.jsonl", "memory.jsonl"),
    *("attest/*", "sync/*.json*", "logs/**/*"),
)

Watch = Callable[[Outcome], None]


def run_row(
    row: Row,
    *,
    folder: Path,
    capability: tuple[int, int] | None,
    stop: Interrupts,
    watch: Watch = lambda outcome: None,
    until: float = math.inf,
) -> Outcome:
    """folder: is made.  capability: of the GPU; None: rehearse on the CPU.  watch: gets what is found, while it is.
    until: on the monotonic clock, where all rows end.

    The time limit is that of all processes of the row together.
    """
    folder.mkdir()
    started, waiting = time.monotonic(), None
    deadline = min(started + row.limit_s, until)
    too_late = OVER if deadline == until else f"ended by its time limit of {row.limit_s:.0f} s"
    while True:
        how = _one_process(
            row, folder=folder, capability=capability, deadline=deadline, too_late=too_late, stop=stop, watch=watch
        )
        outcome = read_outcome(folder) or Outcome(row=row.id, state=State.RUNNING)
        if how == OVER and outcome.state is not State.RUNNING:  # only its process had not ended
            how = ""
        outcome = outcome.ended(how, state=State.INTERRUPTED if stop.names or how == OVER else State.FAILED)
        outcome = outcome.replace(seconds=round(time.monotonic() - started, 1))
        write_whole(folder / OUTCOME, outcome.model_dump_json(indent=1) + "\n")
        before, waiting = waiting, outcome.waiting
        if not waiting or waiting == before or stop.names or time.monotonic() >= deadline:
            break
        watch(outcome)
    _keep_little(folder)
    return outcome


def _one_process(
    row: Row,
    *,
    folder: Path,
    capability: tuple[int, int] | None,
    deadline: float,
    too_late: str,
    stop: Interrupts,
    watch: Watch,
) -> str:
    """Run one process. Returns how it ended, where that was not well. too_late: the words for the deadline."""
    arguments, device = json.dumps(dict(row.arguments)), "gpu" if capability else "cpu"
    with (folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            module_argv("benchmarks.accept.child", row.id, row.code, arguments, str(folder), device),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=row_env(row, folder=folder, capability=capability),
            start_new_session=True,
        )
        family = _Family(f"{MARK}={folder.absolute()}", root=process.pid)
        with _nothing_left(family, process=process, stop=stop, at_once=too_late == OVER):
            while (code := process.poll()) is None:
                family.look()
                if stop.names:
                    console.say(
                        f"     ending {row.id}, in up to {2 * PATIENCE_S:.0f} s; a second signal ends it at once"
                    )
                    return f"by {stop.names[0]}"
                if time.monotonic() >= deadline:
                    _write_stacks(folder, family)
                    return too_late
                if found := read_outcome(folder):
                    watch(found)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_EVERY_S)
    if code in (0, LOST):
        return ""
    return f"its process was ended by signal {-code}" if code < 0 else f"its process ended with {code}"


class _Family:
    """All processes of a row: by their mark, and by descent while it lasts, for one with its own title has lost
    the mark, and outlives its parent as nobody's child."""

    def __init__(self, mark: str, *, root: int) -> None:
        self._mark, self.root = mark, root
        self._known: set[tuple[int, int]] = set()  # process ids and starts

    def look(self) -> None:
        for below in (None, self.root):
            self._known |= {(each.pid, each.start) for each in find_processes(self._mark, below=below)}

    def living(self) -> list[Process]:
        self.look()
        return [each for each in find_processes(self._mark, below=1) if (each.pid, each.start) in self._known]


@contextmanager
def _nothing_left(
    family: _Family, *, process: subprocess.Popen[bytes], stop: Interrupts, at_once: bool
) -> Iterator[None]:
    """The process and its family are gone at the end. A second signal ends the patience with them. at_once: there is
    little time for it."""
    try:
        yield
    finally:
        patience_s = PATIENCE_S if process.poll() is None and not at_once else PATIENCE_S / 4
        family.look()
        if process.poll() is None:
            process.terminate()
        end_processes(family.living, patience_s=patience_s, pause=lambda seconds: _pause(seconds, stop))
        process.wait()


def _pause(seconds: float, stop: Interrupts) -> bool:
    time.sleep(seconds)
    return len(stop.names) > 1


def _write_stacks(folder: Path, family: _Family) -> None:
    """Write the stacks of all threads of the processes that registered for it: the row's own, engines, and those of a
    training. By SIGUSR2: SIGUSR1 tells a training's subreaper to end it."""
    living = {each.pid for each in family.living()} | {family.root}
    for stacks in sorted(folder.rglob(STACKS_FOLDER)):
        dump_stacks(stacks.parent, living=living)


def row_env(row: Row, *, folder: Path, capability: tuple[int, int] | None) -> dict[str, str]:
    """Make the environment that a run's processes have, without a plan, and without the hub. Parameters as of run_row.

    A rehearsal hides GPUs from what runs in the GPU flavour too; Ray would not start, whose "GPUs" are CPU ranks then.
    """
    is_cpu = capability is None
    row_variables = dict(
        child_env(
            folder.absolute(), is_cpu=is_cpu, threads=1, kv_cache_gb=1, offline=True, backends=(), capability=capability
        )
    )
    of_a_run = {name for name in row_variables if name in (PLAN_VARIABLE, RAY_DIR_VARIABLE) or name.startswith("VERL_")}
    for name in of_a_run:
        row_variables.pop(name)
    if is_cpu:  # verl's platform for a CPU, which our trainer registers
        row_variables |= {PLATFORM_VARIABLE: "cpu", "VERL_USE_EXTERNAL_MODULES": "appliance.trainer.worker"}
        row_variables |= HIDDEN if row.is_plain else {}
    row_variables |= {MARK: str(folder.absolute()), LOG_DIR_VARIABLE: str(folder.absolute()), "PYTHONFAULTHANDLER": "1"}
    return os.environ | row_variables | import_path()


def _keep_little(folder: Path) -> None:
    """Models are large: of what a row made stay its log and the ends of the files that say what a training did."""
    found = [folder / STACKS_FOLDER, *folder.glob("runs/*/")]
    files = [file for root in found for pattern in ("*.txt", *_WANTED) for file in sorted(root.glob(pattern))]
    for file in [each for each in files if each.is_file() and each.stat().st_size][:KEPT_FILES]:
        target = folder / KEPT / file.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        with file.open("rb") as whole:
            whole.seek(max(0, file.stat().st_size - KEPT_BYTES))
            target.write_bytes(whole.read())
    for each in folder.iterdir():
        if each.is_dir() and each.name != KEPT:
            shutil.rmtree(each, ignore_errors=True)

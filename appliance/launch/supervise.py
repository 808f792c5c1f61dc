"""One child: started, watched, stopped by signals, and gone with everything below it when this returns or dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from appliance.errors import PreflightError
from appliance.launch.subreaper import SubreaperOrder, SubreaperReport, become_subreaper
from appliance.processes import Process, end_processes, find_processes, module_argv
from appliance.signals import Interrupts
from appliance.terms.environment import RUN_VARIABLE

GRACE_S = 20.0  # Ray and vLLM need a few seconds to end politely
PATIENCE_S = 3.0  # what daemons get to follow the child by themselves
SWEEP_TAKES_S = 30.0  # of a launcher that was killed, on a busy host; alone it takes under a second
_TICK_S = 0.1
_SUBREAPER = "appliance.launch.subreaper"


@dataclass(frozen=True)
class GracefulStop:
    """How a child is asked to end in its own way."""

    tell: Callable[[str], None]
    """Function that asks the child to end; it gets the signal's name."""
    budget_s: float
    """Seconds that the child may take."""


def supervise(
    argv: Sequence[str],
    *,
    run_dir: Path,
    env: Mapping[str, str],
    log: Path,
    interrupts: Interrupts,
    on_tick: Callable[[], None],
    ask: GracefulStop | None = None,
    remove: str = "",
    grace_s: float = GRACE_S,
    patience_s: float = PATIENCE_S,
) -> SubreaperReport:
    """Run one child in its own session until it and everything below it is gone.

    The first signal becomes a SIGTERM to the child, or what `ask` does and then, after its budget, a SIGTERM. SIGKILL
    follows after grace_s or at the second signal. on_tick is called about ten times a second; an error in it ends the
    child, and is raised when everything is gone.
    env: the child's whole environment.  log: gets its stdout and stderr, appended.  remove: a folder that is removed if
    this process is killed.  Raises OSError when the log cannot be written.
    Call it from the main thread: the kernel ends the child when the thread that started it ends.
    """
    become_subreaper()
    mark = f"{RUN_VARIABLE}={run_dir}"
    before = {process.pid for process in find_processes(mark, below=os.getpid())}
    receive, report = os.pipe()
    order = SubreaperOrder(
        tuple(argv), report, os.getpid(), mark, grace_s=grace_s, patience_s=patience_s, remove=remove
    )
    with log.open("ab") as file, os.fdopen(receive, "rb") as answer:
        try:
            subreaper = subprocess.Popen(
                module_argv(_SUBREAPER, json.dumps(asdict(order))),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**env, RUN_VARIABLE: str(run_dir)},
                pass_fds=(report,),
                start_new_session=True,
            )
        finally:
            os.close(report)
        try:
            _watch(subreaper, interrupts=interrupts, ask=ask, on_tick=on_tick)
        finally:
            if subreaper.poll() is None:  # the watch was left by an error
                subreaper.send_signal(signal.SIGUSR1)
                subreaper.wait()
        said = answer.read()
    return SubreaperReport.from_json(said) if said else _without_subreaper(mark, before=before)


def wait_for_sweep(run_dir: Path, *, within_s: float = SWEEP_TAKES_S) -> None:
    """Wait until no subreaper of this run is there: one whose launcher was killed ends all that carries the run's
    mark, and the next attempt's processes carry it, too. Raises PreflightError."""
    deadline = time.monotonic() + within_s
    while sweepers := [
        each for each in find_processes(f"{RUN_VARIABLE}={run_dir}") if os.fsencode(_SUBREAPER) in each.command
    ]:
        if time.monotonic() > deadline:
            hint = f"wait for it; if it hangs: kill -9 {sweepers[0].pid}"
            raise PreflightError(f"{run_dir}: process {sweepers[0].pid} is still ending the earlier attempt", hint=hint)
        time.sleep(0.05)


def _watch(
    subreaper: subprocess.Popen[bytes], *, interrupts: Interrupts, ask: GracefulStop | None, on_tick: Callable[[], None]
) -> None:
    handled, end_at = 0, float("inf")
    while True:
        heard = len(interrupts.names)
        if heard > handled:
            if heard > 1:
                subreaper.send_signal(signal.SIGUSR1)
            else:
                end_at = time.monotonic()
                with contextlib.suppress(OSError):  # a full disk: it would have nowhere to save to either
                    if ask is not None:
                        ask.tell(interrupts.names[0])
                        end_at = time.monotonic() + ask.budget_s
            handled = heard
        if time.monotonic() >= end_at:
            subreaper.send_signal(signal.SIGTERM)
            end_at = float("inf")
        on_tick()
        try:
            subreaper.wait(timeout=_TICK_S)
        except subprocess.TimeoutExpired:
            continue
        on_tick()
        return


def _without_subreaper(mark: str, *, before: set[int]) -> SubreaperReport:
    """End and reap what was left behind where the subreaper itself was killed, and the child with it."""
    adopted: set[int] = set()

    def orphans() -> list[Process]:
        processes = [process for process in find_processes(mark, below=os.getpid()) if process.pid not in before]
        adopted.update(process.pid for process in processes)
        for pid in adopted:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return processes

    ended, left = end_processes(orphans, patience_s=0.0, pause=lambda seconds: bool(time.sleep(seconds)))
    return SubreaperReport(-signal.SIGKILL, ended=ended, left=left)

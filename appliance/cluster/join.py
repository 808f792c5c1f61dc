"""`appliance join`: this host becomes a node of another one's training, until the head ends or somebody stops it."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from appliance import console
from appliance.cluster.node_report import host_of
from appliance.cluster.node_watch import LOOK_EVERY_S, NodeIsOver, NodeWatch
from appliance.cluster.ray_command import NodeOffer, node_environment, worker_argv
from appliance.cluster.run_notice import RunNotice, end_of, is_resumed, read_notice
from appliance.errors import EngineError, Interrupted, PreflightError, ProcessDied, RecipeError, TrainingError
from appliance.launch.supervise import supervise
from appliance.plan.host import DEFAULT_BASE, Ports
from appliance.preflight.access import check_token, head_problem, ports_in_use
from appliance.preflight.probes import read_host
from appliance.recipe.text import path_problem
from appliance.record.session import RunStatus, cannot_write
from appliance.signals import Interrupts
from appliance.terms.environment import NODE_VARIABLE, RAY_OWN, short_root

_LOG_TAIL_LINES = 12
_CPU_OBJECT_STORE_BYTES = 256 << 20
_FOLDER = "appliance-node-"
_RANDOM = 8  # characters that tempfile adds
_REFUSED = ("Unauthenticated", "authentication", "token")


def join_head(
    head: str, *, token_file: Path, gpus: int | None, port: int, node_address: str | None, wait_s: float
) -> int:
    """Wait for the head, join it, stay until it ends. Returns 0 when its training ended, by itself or by a stop.

    head: `host:port`, or a host with the default port.  gpus: what this node offers, None: all there are, one rank on a
    CPU.  port: first of this node's ports.  wait_s: how long the head may take to appear.
    Raises RecipeError, PreflightError (no token, no port, no head), EngineError (Ray could not join), Interrupted,
    TrainingError (the training failed, or its head is gone).
    """
    head = head if ":" in head else f"{head}:{DEFAULT_BASE}"
    try:
        host_of(head)
    except ValueError as error:
        raise RecipeError([(f"--head: {error}", "give it as host:port")]) from error
    if problem := path_problem(str(token_file.absolute())):
        raise RecipeError([(f"--token-file {token_file}: {problem}", "give the path of the head's token file")])
    if _is_there(token_file):  # else the head makes it when it starts
        check_token(token_file)
    if taken := ports_in_use(Ports(port).of_a_node):
        raise PreflightError(
            f"in use on this host: ports {', '.join(map(str, taken))}",
            hint="end what listens there, or choose others with --port (docs/cluster.md)",
        )
    facts = read_host(Path.cwd())
    offer = NodeOffer(
        gpus=gpus if facts.gpus or gpus is not None else 1,
        cores=facts.cores,
        object_store_bytes=None if facts.gpus else _CPU_OBJECT_STORE_BYTES,
        address=node_address or "",
    )
    with Interrupts() as interrupts, contextlib.ExitStack() as at_the_end:
        _wait_for(head, wait_s=wait_s, stop=lambda: bool(interrupts.names))
        check_token(token_file)
        folder = Path(at_the_end.enter_context(_own_folder()))  # no sooner: one killed while it waits would leave it
        console.say(f"joining {head} as {socket.gethostname()}; Ctrl-C leaves it")
        log = folder / "ray.log"
        code = None
        with NodeWatch(head, folder=folder, log=log) as watch, contextlib.suppress(NodeIsOver):
            report = supervise(
                worker_argv(offer, ports=Ports(port), head=head, ray_dir=folder / RAY_OWN),
                run_dir=folder,
                env={
                    **node_environment(dict(os.environ), token_file=token_file.absolute()),
                    NODE_VARIABLE: str(folder),
                },
                log=log,
                interrupts=interrupts,
                on_tick=watch.tick,
                remove=str(folder),
            )
            code = report.returncode
        if interrupts.names:
            raise Interrupted(f"left {head} on {interrupts.names[0]}")
        if not watch.has_joined and not head_problem(head):
            raise _not_joined(head, code=code, log=log)
        return _end(head, training=read_notice(folder), was_silent=watch.was_silent, code=code, log=log)


def _is_there(token_file: Path) -> bool:
    """Also where its folder may not be entered: reading it says so."""
    try:
        return token_file.exists()
    except OSError:
        return True


def _own_folder() -> tempfile.TemporaryDirectory[str]:
    """Of this `join`, gone with it: nobody else may enter it, and Ray's sockets and files lie in it.

    Raises PreflightError when it cannot be made.
    """
    root = short_root(Path(tempfile.gettempdir()), length=len(_FOLDER) + _RANDOM)
    try:
        return tempfile.TemporaryDirectory(prefix=_FOLDER, dir=root, ignore_cleanup_errors=True)
    except OSError as error:
        raise cannot_write(root, error, setting="TMPDIR") from error


def _wait_for(head: str, *, wait_s: float, stop: Callable[[], bool]) -> None:
    """Raises PreflightError when the head does not answer in time, Interrupted."""
    deadline, said = time.monotonic() + wait_s, False
    while head_problem(head):
        if stop():
            raise Interrupted(f"stopped while waiting for {head}")
        if time.monotonic() > deadline:
            raise PreflightError(
                f"no answer from {head} after {wait_s:g} s", hint="is `appliance train` running there, and reachable?"
            )
        if not said:
            console.say(f"waiting for the head at {head}")
            said = True
        time.sleep(LOOK_EVERY_S)


def _end(head: str, *, training: RunNotice | None, was_silent: bool, code: int | None, log: Path) -> int:
    """Why this node's Ray ended after it had joined. Returns 0 where the training ended as it should.

    Raises TrainingError (the training failed, the head is gone or another one), EngineError (Ray, here).
    """
    again = f"join again: it goes on with `train --resume` on {head}"
    ended = end_of(training) if training else None
    if training and ended:
        name = training.run_dir.name
        if ended.state is RunStatus.FAILED:
            raise TrainingError(f"the training {name} failed: {ended.reason}", hint=again)
        console.say(f"the training {name} ended: {ended.reason or ended.state}")
        return 0
    if head_problem(head):
        raise ProcessDied(f"the head at {head} is gone, and so is the work of this node", hint=again)
    if was_silent or (training and is_resumed(training)):
        raise ProcessDied(f"the head at {head} was started anew: this node was of the one before", hint=again)
    _show_end_of(log)
    raise EngineError(f"Ray on this node ended{_with(code)}, and {head} is still there", hint="see above")


def _not_joined(head: str, *, code: int | None, log: Path) -> EngineError | PreflightError:
    if any(word in log.read_text(errors="replace") for word in _REFUSED):
        return PreflightError(f"{head} refused this node's token", hint="give the head's token file with --token-file")
    _show_end_of(log)
    return EngineError(f"Ray on this node ended{_with(code)} before it had joined {head}", hint="see above")


def _with(code: int | None) -> str:
    """None: it was `join` that ended it."""
    return "" if code is None else f" with code {code}"


def _show_end_of(log: Path) -> None:
    for line in log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]:
        console.say(f"  {line}")

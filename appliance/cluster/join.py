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
from appliance.cluster.identity import host_of
from appliance.cluster.ray_command import NodeOffer, node_environment, worker_argv
from appliance.cluster.token import check_token
from appliance.errors import EngineError, Interrupted, PreflightError, RecipeError
from appliance.flashrl.variables import without_flashrl
from appliance.plan.ports import DEFAULT_BASE, Ports
from appliance.preflight.probes import read_host
from appliance.run.supervise import Interrupts, supervise

_LOOK_EVERY_S = 2.0
_CONNECT_WITHIN_S = 3.0
_LOG_TAIL_LINES = 12
_CPU_OBJECT_STORE_BYTES = 256 << 20
_REFUSED = ("Unauthenticated", "authentication", "token")


def join_head(
    head: str, *, token_file: Path, gpus: int | None, port: int, node_address: str | None, wait_s: float
) -> int:
    """Wait for the head, join it, stay until it ends. Returns 0 when the head ended.

    head: `host:port`, or a host with the default port.  gpus: what this node offers, None: all there are, one rank on a
    CPU.  port: first of this node's ports.  wait_s: how long the head may take to appear.
    Raises RecipeError, PreflightError (no token, no head), EngineError (Ray could not join), Interrupted.
    """
    head = head if ":" in head else f"{head}:{DEFAULT_BASE}"
    try:
        host_of(head)
    except ValueError as error:
        raise RecipeError([(f"--head: {error}", "give it as host:port")]) from error
    if token_file.exists():  # else the head makes it when it starts
        check_token(token_file)
    facts = read_host(Path.cwd())
    offer = NodeOffer(
        gpus=gpus if facts.gpus or gpus is not None else 1,
        cores=facts.cores,
        object_store_bytes=None if facts.gpus else _CPU_OBJECT_STORE_BYTES,
        address=node_address or "",
    )
    with Interrupts() as interrupts, tempfile.TemporaryDirectory(prefix="appliance-node-") as folder:
        _wait_for(head, wait_s=wait_s, stop=lambda: bool(interrupts.names))
        check_token(token_file)
        console.say(f"joining {head} as {socket.gethostname()}; Ctrl-C leaves it")
        log = Path(folder) / "ray.log"
        report = supervise(
            worker_argv(offer, ports=Ports(port), head=head),
            run_dir=Path(folder),
            env=node_environment(without_flashrl(os.environ), token_file=token_file.absolute()),
            log=log,
            interrupts=interrupts,
            on_tick=_joined_once(log),
        )
        if interrupts.names:
            raise Interrupted(f"left {head} on {interrupts.names[0]}")
        if _answers(head):
            raise _failed(head, code=report.returncode, log=log)
    console.say(f"the head at {head} ended, and this node with it")
    return 0


def _wait_for(head: str, *, wait_s: float, stop: Callable[[], bool]) -> None:
    """Raises PreflightError when the head does not answer in time, Interrupted."""
    deadline, said = time.monotonic() + wait_s, False
    while not _answers(head):
        if stop():
            raise Interrupted(f"stopped while waiting for {head}")
        if time.monotonic() > deadline:
            raise PreflightError(
                f"no answer from {head} after {wait_s:g} s", hint="is `appliance train` running there, and reachable?"
            )
        if not said:
            console.say(f"waiting for the head at {head}")
            said = True
        time.sleep(_LOOK_EVERY_S)


def _answers(head: str) -> bool:
    host, _, port = head.rpartition(":")
    with contextlib.suppress(OSError):
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_WITHIN_S).close()
        return True
    return False


def _joined_once(log: Path) -> Callable[[], None]:
    """Say, once, that Ray runs here."""
    said = False

    def tick() -> None:
        nonlocal said
        if not said and log.exists() and "Ray runtime started" in log.read_text(errors="replace"):
            said = True
            console.say("joined; this node works for the training until it ends")

    return tick


def _failed(head: str, *, code: int, log: Path) -> EngineError | PreflightError:
    text = log.read_text(errors="replace")
    if any(word in text for word in _REFUSED):
        return PreflightError(f"{head} refused this node's token", hint="give the head's token file with --token-file")
    for line in text.splitlines()[-_LOG_TAIL_LINES:]:
        console.say(f"  {line}")
    return EngineError(f"Ray on this node ended with code {code}, and {head} is still there", hint="see above")

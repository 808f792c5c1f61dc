"""`appliance join`: this host becomes a node of another one's training, until the head ends or somebody stops it."""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from appliance import console
from appliance.cluster.form import CPU_OBJECT_STORE_BYTES, NodeOffer, cpus_for_ray, node_environment, worker_argv
from appliance.cluster.node_report import RunNotice, is_resumed, read_end, read_notice
from appliance.errors import EngineError, Interrupted, PreflightError, ProcessDied, RecipeError, TrainingError
from appliance.finding import fault
from appliance.launch.supervise import supervise
from appliance.plan.host import DEFAULT_BASE, Ports
from appliance.preflight.access import check_token, head_problem, ports_in_use
from appliance.preflight.probes import read_host
from appliance.processes import find_processes
from appliance.recipe.text import path_problem
from appliance.record.session import RunStatus, cannot_write
from appliance.signals import Interrupts
from appliance.terms.environment import (
    NODE_VARIABLE,
    RAY_OWN,
    RECONNECT_S,
    RUN_VARIABLE,
    short_root,
    temporary_env,
)

_LOOK_EVERY_S = 2.0
_LOOKS_WITHOUT = 3  # Ray says why its scheduler died a second or two after its death
_LOG_TAIL_LINES = 12
_FOLDER = "appliance-node-"
_LAST_PORT = 65535
_HOST = re.compile(r"[^\s/:\[\]]+|\[[^\s/\[\]]+\]")  # a name, or an address, of IPv6 in brackets
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
    host, _, at = head.rpartition(":")
    is_port = at.isascii() and at.isdigit() and len(at) <= 5 and int(at) <= _LAST_PORT
    if not is_port or not _HOST.fullmatch(host):  # a URL would be waited for as a name that never answers
        raise RecipeError(
            [fault(("--head",), f"`{head}` is not host:port", f"give it as host:port, with a port up to {_LAST_PORT}")]
        )
    if problem := path_problem(str(token_file.absolute())):
        raise RecipeError([fault((f"--token-file {token_file}",), problem, "give the path of the head's token file")])
    try:
        check_token(token_file)
    except PreflightError as error:
        if not isinstance(error.__cause__, FileNotFoundError):  # else the head makes it when it starts
            raise
    if taken := ports_in_use(Ports(port).of_a_node):
        raise PreflightError(
            f"in use on this host: ports {', '.join(map(str, taken))}",
            hint="end what listens there, or choose others with --port (docs/cluster.md)",
        )
    facts = read_host(Path.cwd())
    offer = NodeOffer(
        gpus=gpus if facts.gpus or gpus is not None else 1,
        cpus=cpus_for_ray(facts.cores, ranks=gpus or len(facts.gpus) or 1, is_cpu=not facts.gpus),
        object_store_bytes=None if facts.gpus else CPU_OBJECT_STORE_BYTES,
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
                    **temporary_env(folder),
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


def _own_folder() -> tempfile.TemporaryDirectory[str]:
    """Make the folder of this `join`, which is removed with it: nobody else may enter it, and Ray's sockets and files
    lie in it. Raises PreflightError when it cannot be made."""
    root = short_root(Path(tempfile.gettempdir()), length=len(_FOLDER) + _RANDOM)
    try:
        return tempfile.TemporaryDirectory(prefix=_FOLDER, dir=root, ignore_cleanup_errors=True)
    except OSError as error:
        raise cannot_write(root, error, setting="TMPDIR") from error


def _wait_for(head: str, *, wait_s: float, stop: Callable[[], bool]) -> None:
    """Wait for the head. Raises PreflightError when it does not answer in time, Interrupted."""
    deadline, has_said_so = time.monotonic() + wait_s, False
    while head_problem(head):
        if stop():
            raise Interrupted(f"stopped while waiting for {head}")
        if time.monotonic() > deadline:
            raise PreflightError(
                f"no answer from {head} after {wait_s:g} s", hint="is `appliance train` running there, and reachable?"
            )
        if not has_said_so:
            console.say(f"waiting for the head at {head}")
            has_said_so = True
        time.sleep(_LOOK_EVERY_S)


def _end(head: str, *, training: RunNotice | None, was_silent: bool, code: int | None, log: Path) -> int:
    """Find out why this node's Ray ended after it had joined. Returns 0 where the training ended as it should. Raises
    TrainingError (the training failed, the head is gone or another one), EngineError (Ray, here)."""
    again = f"join again: the run resumes with `train --resume` on {head}"
    ended = read_end(training) if training else None
    if training and ended:
        name = training.run_dir.name
        if ended.state is RunStatus.FAILED:
            raise TrainingError(f"the training {name} failed: {ended.reason}", hint=again)
        console.say(f"the training {name} ended: {ended.reason or ended.state}")
        return 0
    if head_problem(head):
        raise ProcessDied(f"the head at {head} is gone, and so is the work of this node", hint=again)
    if was_silent or (training and is_resumed(training)):
        raise ProcessDied(f"the head at {head} was restarted: this node belonged to the one before", hint=again)
    _show_end_of(log)
    raise EngineError(f"Ray on this node ended{_with(code)}, and {head} is still there", hint="see above")


def _not_joined(head: str, *, code: int | None, log: Path) -> EngineError | PreflightError:
    if any(word in log.read_text(errors="replace") for word in _REFUSED):
        return PreflightError(f"{head} refused this node's token", hint="give the head's token file with --token-file")
    _show_end_of(log)
    return EngineError(f"Ray on this node ended{_with(code)} before it had joined {head}", hint="see above")


def _with(code: int | None) -> str:
    """Describe the exit code; None: it was `join` that ended it."""
    return "" if code is None else f" with code {code}"


def _show_end_of(log: Path) -> None:
    for line in log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]:
        console.say(f"  {line}")


class NodeIsOver(Exception):
    """Ends Ray on this node: there is nothing that it could still do."""


@dataclass(frozen=True)
class NodeHealth:
    silent_s: float = 0.0
    """Seconds for which the head has not answered, 0 while it does."""
    ended: bool = False
    """Whether the head's training ended, by run.json."""
    without_scheduler: int = 0
    """Number of checks in a row, the last one included, that found no scheduler."""


def is_over(health: NodeHealth) -> bool:
    """Tell whether this node can do no more work. A head that is silent may only be slow, but not when its training
    ended."""
    is_gone = health.silent_s >= RECONNECT_S or (health.silent_s > 0 and health.ended)
    return is_gone or health.without_scheduler >= _LOOKS_WITHOUT


class NodeWatch:
    """Watches from outside of Ray, which may wait for ever, whether a node that joined is still of use.

    `ray start --block` keeps running when its scheduler ended without an error, and a scheduler hears nothing of a head
    whose host went silent. So `join` looks for itself whether the head's port answers, whether there is a scheduler,
    and what run.json says. It does so on its own thread, because a host that went silent takes seconds to not answer.
    """

    def __init__(self, head: str, *, folder: Path, log: Path) -> None:
        """folder: of `join`, the mark of the node's processes.  log: of Ray."""
        self._head = head
        self._folder = folder
        self._log = log
        self._health = NodeHealth()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="node-watch", daemon=True)
        self._silent_at = -math.inf
        self.has_joined = False

    @property
    def was_silent(self) -> bool:
        """Whether the head was silent a moment ago: a head that was restarted ends the nodes of the head before."""
        return time.monotonic() - self._silent_at < RECONNECT_S

    def __enter__(self) -> NodeWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()

    def tick(self) -> None:
        """Say, once, that Ray runs here. Raises NodeIsOver."""
        if (
            not self.has_joined
            and self._log.exists()
            and "Ray runtime started" in self._log.read_text(errors="replace")
        ):
            self.has_joined = True
            console.say("joined; this node works for the training until it ends")
        if is_over(self._health):
            raise NodeIsOver

    def _watch(self) -> None:
        answered = time.monotonic()
        while not self._over.wait(_LOOK_EVERY_S):
            if not head_problem(self._head):
                answered = time.monotonic()
                silent_s = 0.0
            else:
                self._silent_at = time.monotonic()
                silent_s = self._silent_at - answered
            training = read_notice(self._folder)
            has_scheduler = not self.has_joined or self._has_scheduler()
            self._health = NodeHealth(
                silent_s=silent_s,
                ended=training is not None and read_end(training) is not None,
                without_scheduler=0 if has_scheduler else self._health.without_scheduler + 1,
            )

    def _has_scheduler(self) -> bool:
        ours = find_processes(f"{RUN_VARIABLE}={self._folder}", below=os.getpid())
        return any(process.name == "raylet" for process in ours)

"""Ray's workers and vLLM's engine on a CPU: forks of a process that has imported torch, verl and vLLM.

Each of them would import these again, for ten seconds of a core. So the driver imports them, and while it has one
thread of Python's it forks a server of forks. In place of Python, Ray starts `worker_command` (`py_executable` of its
runtime environments): this file as a program, which asks the server for a fork that gets its arguments, variables,
folder and streams, and ends. Without an answer it becomes the Python that Ray meant. A rollout server's process keeps
one more fork, which becomes its engine: what Python's multiprocessing would spawn, and its child.

Not where CUDA is: it does not survive a fork, and importing asks for devices.

As a program this file runs without site-packages: the standard library at its head, and ours where it is used.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import runpy
import select
import shlex
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import util
from pathlib import Path
from types import SimpleNamespace

NAME = "appliance-forks"  # the kernel's, of the server, and of forks that have none yet: their command is the driver's
_ANSWERS_WITHIN_S = 10.0
_MOST_FDS = 64
_OWN = Path("/proc/self")
_LIBRARIES = "LD_LIBRARY_PATH"
_SPAWNED = "--multiprocessing-fork"  # Python's mark of what `multiprocessing` spawns


@dataclass(frozen=True)
class Program:
    argv: list[str]
    """Arguments of Python, without options: a file and its arguments, or `-c` and code."""
    env: dict[str, str]
    cwd: str
    fds: list[int]
    """Numbers of the descriptors that come with it."""
    open_files: tuple[int, int]
    """Limits of open files of the process that asks, as the kernel has them."""
    nice: int
    """Niceness of the process that asks, as the kernel has it."""
    oom_score: str
    """OOM score adjustment of the process that asks, as the kernel has it."""


def worker_command(address: Path) -> str:
    """Return the command that a shell runs in place of Python.  address: the server's."""
    return shlex.join([sys.executable, "-I", "-S", __file__, str(address)])


@contextlib.contextmanager
def as_ray_worker() -> Iterator[None]:
    """Make this process look like Ray's worker, to import in it what the forks are to have, Ray first: it reads two
    variables of a worker once, when it is imported.

    The id of their job: a Ray of a run's own has one. And the process with which they end: the raylet, whose end the
    driver does not outlive (process_watch.py), so this one will do: it is there before. The ids of actor classes that
    are defined meanwhile are not Ray's own draws, after which all forks would continue with the same ones. OpenCV's
    change of the library path, meant for itself, would be every process's.
    """
    of_workers = {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": str(os.getpid())}
    path = os.environ.get(_LIBRARIES)
    os.environ |= of_workers
    from ray import actor

    ids = actor.ActorClassID
    actor.ActorClassID = SimpleNamespace(from_random=lambda: ids(os.urandom(ids.size())))
    try:
        yield
    finally:
        actor.ActorClassID = ids
        for name in (*of_workers, _LIBRARIES):
            os.environ.pop(name, None)
        if path is not None:
            os.environ[_LIBRARIES] = path


def start_server(address: Path) -> None:
    """Fork this process, which has one thread of Python's. The server ends with it. In each fork of the server, this
    ends the process when its program is over, by SystemExit.

    address: of the socket that it makes.  Raises OSError, and RuntimeError where there are more threads.
    """
    if threading.active_count() > 1:
        raise RuntimeError(f"threads would be missing in forks: {threading.enumerate()}")
    address.unlink(missing_ok=True)  # of an attempt before
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(64)
        ended, lifeline = os.pipe()
        gc.collect()
        gc.freeze()  # a collection would write to every object, and take its memory twice
        if os.fork() > 0:
            os.close(ended)  # and `lifeline` stays open as long as this process lives
            return
        os.close(lifeline)
        program = _served(listener, ended)
    try:
        _become(program)
    except Exception:  # no failure of the driver's, whose code is above this
        traceback.print_exc()
        sys.exit(1)


def _served(listener: socket.socket, ended: int) -> Program:
    """Serve forks. Returns in a fork, with the program that it is to be; the server itself does not return."""
    from appliance.record.liveness import forget_stacks

    forget_stacks()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that ended leave nothing
    _write("comm", NAME)
    try:
        while ended not in select.select([listener, ended], [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(_ANSWERS_WITHIN_S)
                if (program := _forked(connection)) is not None:
                    os.close(ended)
                    return program
    except Exception:  # what its forks would meet, too; from now on Python starts what they would have been
        traceback.print_exc()
    os._exit(0)


def _forked(connection: socket.socket) -> Program | None:
    """Fork for one request. Returns in the fork, with the program that it is to be. The fork answers: who has waited
    in vain has become it by itself."""
    try:
        program, fds = _receive(connection)
    except (OSError, ValueError, TypeError):  # who asked has died
        return None
    try:
        if os.fork() > 0:
            return None
        try:
            _take(fds, program)
            connection.sendall(b"1")
        except OSError:
            os._exit(1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)  # as Ray starts its workers
        return program
    finally:
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)


def _become(program: Program) -> None:
    from appliance.terms.environment import SPARE_VARIABLE

    if SPARE_VARIABLE in program.env:
        program = _spare_to_be() or program
    os.environ.clear()
    os.environ.update(program.env)
    os.chdir(program.cwd)
    import numpy

    numpy.random.seed()  # Python's generator is seeded again by Python; torch's begins with the same seed everywhere
    if program.argv[0] == "-c":
        sys.argv = ["-c", *program.argv[2:]]
        exec(program.argv[1], sys.modules["__main__"].__dict__)
    else:
        sys.argv = program.argv
        runpy.run_path(program.argv[0], run_name="__main__")
    sys.exit(0)


def _spare_to_be() -> Program | None:
    """Fork a child of this process, for the one that `multiprocessing` will spawn. Returns there, with what it is to
    be."""
    ours, its = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        import setproctitle

        # By vLLM for its engine. It looks for the place of a title by the variables' addresses, which have changed.
        setproctitle.setproctitle = partial(_write, "comm")
        ours.close()
        try:
            program, fds = _receive(its)
            its.close()
            _take(fds, program)
        except (OSError, ValueError, TypeError):
            os._exit(0)  # the process ended, and has spawned none
        return program
    its.close()
    spawn = util.spawnv_passfds
    spares = [pid]

    def spawn_spare(path: str, args: list[str], passfds: list[int]) -> int:
        if _SPAWNED not in args or not spares:
            return spawn(path, args, passfds)
        spare = spares.pop()
        try:
            with ours:
                _send(ours, args[args.index("-c") :], sorted({0, 1, 2, *passfds}))
        except OSError:  # somebody ended it
            return spawn(path, args, passfds)
        return spare

    util.spawnv_passfds = spawn_spare  # what `multiprocessing` spawns by; it has no hook for anything but a program
    return None


def _send(connection: socket.socket, argv: list[str], fds: list[int]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    nice, oom_score = os.getpriority(os.PRIO_PROCESS, 0), (_OWN / "oom_score_adj").read_text()
    program = Program(argv, dict(os.environ), os.getcwd(), fds, limits, nice, oom_score)
    text = json.dumps(asdict(program)).encode()
    sent = socket.send_fds(connection, [text], fds)
    connection.sendall(text[sent:])
    connection.shutdown(socket.SHUT_WR)


def _receive(connection: socket.socket) -> tuple[Program, list[int]]:
    """Receive a program, and its descriptors, by numbers of this process. Raises ValueError or TypeError where it is
    cut short."""
    text, fds, _, _ = socket.recv_fds(connection, 1 << 16, _MOST_FDS)
    try:
        while more := connection.recv(1 << 16):
            text += more
        return Program(**json.loads(text)), fds
    except (OSError, ValueError, TypeError):
        for fd in fds:
            os.close(fd)
        raise


def _take(fds: list[int], program: Program) -> None:
    """Have this process's limits and descriptors be the program's: its streams for programs that it runs, too."""
    import fcntl

    resource.setrlimit(resource.RLIMIT_NOFILE, program.open_files)
    os.setpriority(os.PRIO_PROCESS, 0, max(program.nice, os.getpriority(os.PRIO_PROCESS, 0)))
    _write("oom_score_adj", program.oom_score)
    free = max([*fds, *program.fds]) + 1
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, free) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(high, program.fds, strict=True):
        os.dup2(fd, number, inheritable=number <= 2)
        os.close(fd)


def _write(name: str, value: str) -> None:
    """Write a value of this process for the kernel, which may refuse it."""
    with contextlib.suppress(OSError):
        (_OWN / name).write_text(value)


def main() -> None:
    address, *argv = sys.argv[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as server:
        server.settimeout(_ANSWERS_WITHIN_S)
        server.connect(address)
        _send(server, argv, [0, 1, 2])
        if server.recv(1):
            return
    os.execv(sys.executable, [sys.executable, *argv])


if __name__ == "__main__":
    main()

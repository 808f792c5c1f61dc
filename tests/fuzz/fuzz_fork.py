"""A child of ours as a fork: the user's code runs in it as in the real one, thousands of times, and torch is there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from fuzz_watch import forget

MAY = frozenset({"os.fork", "os.killpg"})  # of a case that starts one, in the process that is watched


class Forked:
    """In the place of `subprocess.Popen`: runs `main` of the module that `python -P -m MODULE` would."""

    def __init__(self, argv: Sequence[str], *, stdout: Any, stderr: Any, **_: Any) -> None:
        reads, self._writes = os.pipe()
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid:
            os.close(reads)
            return
        code = 1
        try:
            forget()
            os.setsid()
            for number, stream in enumerate((reads, stdout.fileno(), stderr.fileno())):
                os.dup2(stream, number)
            os.closerange(3, 1024)
            streams = (os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww"))
            sys.stdin, sys.stdout, sys.stderr = streams
            code = import_module(argv[-1]).main()
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
            os._exit(code)

    def communicate(self, given: str | None, *, timeout: float) -> None:
        if given is not None:
            os.write(self._writes, given.encode())  # less than a pipe holds
            os.close(self._writes)
        until = time.monotonic() + timeout
        while not self._has_ended():
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("it", timeout)
            time.sleep(0.002)

    def wait(self) -> int:
        while not self._has_ended():
            time.sleep(0.002)
        assert self._code is not None
        return self._code

    def _has_ended(self) -> bool:
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code is not None

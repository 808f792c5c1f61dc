"""A child of preflight that is started early and heard last, so that other things are read meanwhile. It ends with the
block that it is used in, with all that it left: an error, Ctrl-C or the end of this process waits for no child."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence

from appliance import console
from appliance.processes import end_with_parent
from appliance.tasks.user_code import ChildOutput, last_line, words_in

WITHIN_S = 300.0  # a child loads torch or transformers: with no file in the page cache, on a busy host
REMEDY_OF_LATE = "run `appliance check` again when the host has less to do, or the files lie on a faster disk"
_NOTE_AFTER_S = 20.0


class EarlyChild:
    """A child that is started (`start`) where there is something to do, and whose report is read later (`hear`). It
    reports by `open_voice` of tasks/user_code.py."""

    def __init__(self, *, doing: str) -> None:
        """doing: what it does, for people who wait for it."""
        self._doing = doing
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EarlyChild:
        self._stdin, self._output = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self._printed = tempfile.TemporaryFile()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # code of the model's own may have left processes
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for file in (self._stdin, self._output, self._printed):
            file.close()

    @property
    def is_started(self) -> bool:
        return self._process is not None

    def start(self, argv: Sequence[str], *, stdin: str = "") -> None:
        """Start the child. stdin: text that it reads."""
        self._stdin.write(stdin.encode())
        self._stdin.seek(0)
        self._process = subprocess.Popen(
            argv,
            stdin=self._stdin,
            stdout=self._output,
            stderr=self._printed,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )

    def hear(self) -> ChildOutput:
        """Wait for its end, at most WITHIN_S from now, and return what it reported."""
        assert self._process is not None, "it was started"
        is_late = not self._ends(self._process)
        self._output.seek(0)
        words = words_in(self._output.read().decode(errors="replace"))
        printed = last_line(self._printed)
        return ChildOutput(words, self._process.returncode or 0, is_late, printed)

    def _ends(self, process: subprocess.Popen[bytes]) -> bool:
        deadline = time.monotonic() + WITHIN_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(_NOTE_AFTER_S, WITHIN_S))
            return True
        console.say(f"note: still {self._doing}, for at most {WITHIN_S:g} s")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
            return True
        return False

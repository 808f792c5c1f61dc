"""`vllm serve` in processes of its own, as a user starts it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def command(model: Path, *, port: int, options: tuple[str, ...] = ()) -> list[str]:
    return [str(Path(sys.executable).parent / "vllm"), "serve", str(model), "--port", str(port), *options]


@contextlib.contextmanager
def starting(
    model: Path, *, options: tuple[str, ...], output: Path, environ: dict[str, str]
) -> Iterator[tuple[subprocess.Popen, int]]:
    """A server that may still be starting, and its port; it and its engine processes are gone afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with output.open("wb") as file:
        child = subprocess.Popen(
            command(model, port=port, options=options),
            env=os.environ | environ,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield child, port
    finally:
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=30)
        with contextlib.suppress(ProcessLookupError):  # what the server left behind, by the session that it leads
            os.killpg(child.pid, signal.SIGKILL)

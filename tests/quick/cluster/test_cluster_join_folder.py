"""Where a node that joined keeps its Ray's sockets and files. The command is the real one; Ray is a stand-in that makes
its folders as Ray does, and the longest of its sockets."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

import appliance
from appliance.cluster import join
from appliance.errors import PreflightError

NODE_PORT = 27400
SOON_S = 60.0
RAY = """
import os, pathlib, socket, sys, time

(folder,) = [pathlib.Path(each.partition("=")[2]) for each in sys.argv if each.startswith("--temp-dir=")]
sockets = folder / "session_2026-11-22_10-53-17_123456_4194304" / "sockets"
sockets.mkdir(parents=True)
folder.chmod(0o777)
socket.socket(socket.AF_UNIX).bind(f"{sockets}/plasma_store.1")
told = pathlib.Path(os.environ["TOLD"])
told.with_suffix(".partial").write_text(str(folder))
told.with_suffix(".partial").replace(told)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_ray_of_a_node_is_where_nobody_else_may_enter_and_goes_with_its_join(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """The temporary folder is too long for a socket in it: it is not used."""
    stand_in = tmp_path / "ray" / "scripts"
    stand_in.mkdir(parents=True)
    for name, text in (("../__init__", ""), ("__init__", ""), ("scripts", RAY)):
        (stand_in / f"{name}.py").write_text(text)
    token, ray_dir_file = tmp_path / "token", tmp_path / "told"
    token.write_text("0123456789abcdef")
    token.chmod(0o600)
    paths = os.pathsep.join((str(tmp_path), str(Path(appliance.__file__).parents[1])))
    environment = os.environ | {"PYTHONPATH": paths, "TMPDIR": str(tmp_path), "TOLD": str(ray_dir_file)}
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        options = ("--head", address, "--token-file", str(token), "--port", str(NODE_PORT))
        process = subprocess.Popen([sys.executable, "-m", "appliance", "join", *options], env=environment)
        try:
            wait_until(lambda: ray_dir_file.exists() or process.poll() is not None)
            ray_dir = Path(ray_dir_file.read_text())
            assert ray_dir.name == "ray" and ray_dir.parent.name.startswith("appliance-node-")
            assert stat.S_IMODE(ray_dir.parent.stat().st_mode) == 0o700
        finally:
            process.send_signal(number)
            assert process.wait(SOON_S) == code
    wait_until(lambda: not ray_dir.parent.exists())


def test_a_join_has_no_folder_while_it_waits_for_its_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed there, it would leave one behind: what removes it is started with Ray."""
    monkeypatch.setattr(join, "_own_folder", lambda: pytest.fail("it was made"))
    given = {"token_file": tmp_path / "token", "gpus": 1, "port": NODE_PORT, "node_address": None, "wait_s": 0.0}
    with pytest.raises(PreflightError, match="no answer from"):
        join.join_head("127.0.0.1:1", **given)


def wait_until(condition) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)

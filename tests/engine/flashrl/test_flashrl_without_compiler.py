"""The line of docs/flashrl.md for a host without a compiler, as it stands there."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests
from vllm_server import starting

pytestmark = [pytest.mark.engine, pytest.mark.slow]

START_S = 240  # two cores that others may use as well; 30 s on an idle machine
LINE = re.compile(r"^    ((?:[A-Z_]+=\S+ )+vllm serve MODEL .*)$", re.M)
COMPILERS = ("c++", "cc", "clang", "clang++", "g++", "gcc")
OF_TESTS = ("OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING")


def path_without_compilers(folder: Path) -> str:
    """With what vLLM calls: it asks `lscpu` for the cores."""
    folder.mkdir()
    (folder / "lscpu").symlink_to(shutil.which("lscpu"))
    path = f"{folder}:{Path(sys.executable).parent}"
    assert [name for name in COMPILERS if shutil.which(name, path=path)] == []
    return path


def answers(url: str, *, server: subprocess.Popen) -> bool:
    """As soon as it does, or not at all."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        try:
            return requests.get(f"{url}/health", timeout=5).ok
        except requests.ConnectionError:
            time.sleep(0.5)
    return False


def test_the_documented_line_serves(
    two_checkpoints: tuple[Path, Path], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [line] = LINE.findall((root / "docs/flashrl.md").read_text())
    assert LINE.findall((root / "plugin/README.md").read_text()) == [line]
    words = shlex.split(line)
    start = words.index("vllm")
    variables = dict(word.split("=", 1) for word in words[:start])
    for name in ("CC", "CXX", *OF_TESTS):
        monkeypatch.delenv(name, raising=False)

    model, output = two_checkpoints[0], tmp_path / "server.txt"
    environ = variables | {"PATH": path_without_compilers(tmp_path / "bin")}
    with starting(model, options=tuple(words[start + 3 :]), output=output, environ=environ) as (server, port):
        url = f"http://127.0.0.1:{port}"
        assert answers(url, server=server), output.read_text()[-4000:]
        body = {"model": str(model), "prompt": [9, 2, 3], "max_tokens": 8, "ignore_eos": True}
        said = requests.post(f"{url}/v1/completions", json=body, timeout=60)
        said.raise_for_status()
        assert said.json()["usage"]["completion_tokens"] == 8
    assert "rank 0 has the scheme int8; layers by kernel: " in output.read_text()

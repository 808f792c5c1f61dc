"""`convert-profile`: FlashRL's `profile.pt` becomes a profile of ours. The launcher's side: it reads no pickle."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from appliance import console
from appliance.errors import RecipeError
from appliance.launch.workspace import new_folder
from appliance.profile.command import table
from appliance.quant.files import read_file_header
from appliance.terms.environment import THREADS_VARIABLE

_READER = "appliance.profile.unpickle"
_WRITER = "appliance.quant.donor"  # in a child too: the launcher imports no torch
_REFUSED = RecipeError.exit_code  # of a child that did not like the file
_TIMEOUT_S = 300.0
_HINT = "nothing in the file was run; give the profile.pt that `flashrl profile --fn int8` wrote"


def run_convert(file: Path, *, output: Path) -> int:
    """Write `output/profile.safetensors`. Raises RecipeError for a file that is not FlashRL's, or that wants to run."""
    if not os.path.isfile(file):
        raise RecipeError([(f"{file}: no such file", "give FlashRL's profile.pt")])
    with new_folder(output, option="-o"), tempfile.TemporaryDirectory(prefix="appliance-convert-") as folder:
        scales = Path(folder) / "scales.safetensors"
        _read_apart(file, scales=scales, room=Path(folder) / "room")
        code, lines = _run([_WRITER, str(scales), str(file), str(output)])
        if code:
            raise RecipeError([(line, "") for line in (lines if code == _REFUSED else lines[-1:])])
    for line in table(read_file_header(output), folder=str(output)):
        console.show(line)
    return 0


def _read_apart(file: Path, *, scales: Path, room: Path) -> None:
    """The pickle as safetensors, read by a process without rights."""
    room.mkdir()
    try:
        command = [_READER, str(file), str(scales), str(room)]
        code, lines = _run(command, env=reader_environment(room), timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise RecipeError([(f"{file}: not read within {_TIMEOUT_S:.0f} s", _HINT)]) from error
    if code == _REFUSED and scales.is_file():
        raise RecipeError([(f"{file}: refused: {scales.read_text(errors='replace')[:400]}", _HINT)])
    if code:
        raise RecipeError([(f"{file}: refused: its reader ended: {lines[-1][:400]}", _HINT)])


def _run(module: list[str], **how: Any) -> tuple[int, list[str]]:
    """(exit code, what the child said)."""
    command = [sys.executable, "-m", *module]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, **how)
    return done.returncode, done.stderr.decode(errors="replace").strip().splitlines() or [f"code {done.returncode}"]


def reader_environment(room: Path) -> dict[str, str]:
    """All that the reader gets. One thread: Linux gives no user a network namespace for a process with more."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return {**kept, "TMPDIR": str(room), "HOME": str(room), THREADS_VARIABLE: "1"}

"""`convert-profile`: FlashRL's `profile.pt` becomes a profile of ours. The launcher's side: it reads no pickle."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from appliance import console
from appliance.errors import RecipeError
from appliance.launch.workspace import new_folder
from appliance.profile.table import table
from appliance.quant.files import read_file_header
from appliance.terms.environment import THREADS_VARIABLE

REFUSED = 2  # the exit code of a child that did not like the file
_READER = "appliance.profile.unpickle"
_WRITER = "appliance.profile.take_over"
_TIMEOUT_S = 300.0
_HINT = "nothing in the file was run; give the profile.pt that `flashrl profile --fn int8` wrote"


def run_convert(file: Path, *, output: Path) -> int:
    """Write `output/profile.safetensors`. Raises RecipeError for a file that is not FlashRL's, or that wants to run."""
    if not os.path.isfile(file):
        raise RecipeError([(f"{file}: no such file", "give FlashRL's profile.pt")])
    with new_folder(output, option="-o"), tempfile.TemporaryDirectory(prefix="appliance-convert-") as folder:
        scales = Path(folder) / "scales.safetensors"
        _read_apart(file, scales=scales, room=Path(folder) / "room")
        _write(scales, source=file, output=output)
    for line in table(read_file_header(output), folder=str(output)):
        console.show(line)
    return 0


def _read_apart(file: Path, *, scales: Path, room: Path) -> None:
    """The pickle as safetensors, read by a process without rights."""
    room.mkdir()
    command = [sys.executable, "-m", _READER, str(file), str(scales), str(room)]
    try:
        done = subprocess.run(
            command,
            env=reader_environment(room),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RecipeError([(f"{file}: not read within {_TIMEOUT_S:.0f} s", _HINT)]) from error
    if done.returncode == REFUSED and scales.is_file():
        raise RecipeError([(f"{file}: refused: {scales.read_text(errors='replace')[:400]}", _HINT)])
    if done.returncode:
        why = (done.stderr.decode(errors="replace").strip().splitlines() or [f"code {done.returncode}"])[-1]
        raise RecipeError([(f"{file}: refused: its reader ended: {why[:400]}", _HINT)])


def reader_environment(room: Path) -> dict[str, str]:
    """All that the reader gets. One thread: Linux gives no user a network namespace for a process with more."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return {**kept, "TMPDIR": str(room), "HOME": str(room), THREADS_VARIABLE: "1"}


def _write(scales: Path, *, source: Path, output: Path) -> None:
    """In a child too: the launcher imports no torch."""
    command = [sys.executable, "-m", _WRITER, str(scales), str(source), str(output)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"code {done.returncode}"]
        problems = lines if done.returncode == REFUSED else lines[-1:]
        raise RecipeError([(line, "") for line in problems])

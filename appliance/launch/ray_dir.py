"""Where Ray of one run keeps its sockets and files: made before the child, removed after it.

The folder is private to this user, and so is what lies in it: the token of a Ray on one host, new in every attempt, and
the folder that Ray opens to everybody.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from appliance.errors import PreflightError
from appliance.preflight.access import write_token
from appliance.record.session import cannot_write
from appliance.terms.environment import LONGEST_RAY_DIR, RAY_OWN, RAY_TOKEN


def make_ray_dir(wanted: str) -> Path:
    """Make the folder, private to this user. What a run that was killed left there is removed first.

    Raises PreflightError when it cannot be made, is too long for a socket, or belongs to somebody else.
    """
    folder = Path(wanted)
    if len(os.fsencode(folder)) > LONGEST_RAY_DIR:
        problem = f"{folder}: too long for Ray's sockets, which have {LONGEST_RAY_DIR} bytes for it"
        raise PreflightError(problem, hint="set TMPDIR to a short path such as /tmp")
    try:
        _remove_leftover(folder)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise cannot_write(folder, error, setting="TMPDIR") from error
    return folder


def make_ray_token(folder: Path) -> Path:
    """The file with a new token, in a folder that `make_ray_dir` has made. Raises PreflightError."""
    file = folder / RAY_TOKEN
    try:
        write_token(file)
    except OSError as error:
        raise cannot_write(file, error, setting="TMPDIR") from error
    return file


def _remove_leftover(folder: Path) -> None:
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PreflightError(f"{folder}: belongs to somebody else", hint="have it removed, or set TMPDIR")
    shutil.rmtree(folder)


def keep_ray_logs(ray_dir: Path, *, target: Path) -> bool:
    """Copy Ray's own logs beside the child's, for a run that failed. Returns whether there were any.

    Raises OSError.
    """
    sessions = sorted(path for path in ray_dir.glob(f"{RAY_OWN}/session_*/logs") if not path.parent.is_symlink())
    for logs in sessions:
        shutil.copytree(logs, target, symlinks=True, dirs_exist_ok=True)
    return bool(sessions)

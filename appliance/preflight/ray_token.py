"""The secret that a Ray of ours asks for: in a file that only its owner reads, never on a command line or in a log."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from appliance.errors import PreflightError
from appliance.preflight.container import is_mounted_secret

_SHORTEST = 16


def make_token(file: Path) -> None:
    """Write a new token into `file`, readable by its owner only; one that is there stays.

    Raises PreflightError as `check_token` does, and when it cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            check_token(file)
            return
        write_token(file)
    except OSError as error:
        raise PreflightError(
            f"{file}: {error.strerror}", hint="set cluster.token_file to a place that you can write to"
        ) from error


def write_token(file: Path) -> None:
    """A new token in a new file, readable by its owner only. Raises OSError, also where something is there."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(secrets.token_hex(32) + "\n")


def check_token(file: Path) -> None:
    """Raises PreflightError when there is no token, it is no secret, or others may read it."""
    try:
        text, mode = file.read_text().strip(), stat.S_IMODE(file.stat().st_mode)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise PreflightError(
            f"{file}: {reason}", hint="copy the head's token file here, or give it with --token-file"
        ) from error
    if len(text) < _SHORTEST or not text.isprintable() or len(text.split()) != 1:
        raise PreflightError(
            f"{file}: a token is one word of {_SHORTEST} characters or more", hint="remove the file: the head makes one"
        )
    if mode & 0o077 and not is_mounted_secret(file):
        raise PreflightError(f"{file}: others may read it (mode {mode:04o})", hint=f"chmod 600 {file}")

"""What a text must be to mean anything: paths that can be, patterns that compile."""

from __future__ import annotations

import os
import os.path
import re
from pathlib import Path

MAX_PATH_BYTES, MAX_NAME_BYTES = 1024, 255  # Linux takes 4096 and 255; a run needs some below it
MAX_PATTERN = 200  # characters: deeper ones would end re's own recursion


def full_path(path: str) -> Path:
    """Absolute, with `~` for a home. Any text will do: Path.expanduser also fails for `./~x`, a file's name."""
    return Path(os.path.expanduser(path)).absolute()


def path_problem(path: str) -> str:
    """Why no file can have this path, or an empty text."""
    if path.startswith("~") and os.path.expanduser(path).startswith("~"):
        return f"`{path.partition('/')[0][:60]}` is nobody's home on this host"
    parts = os.fsencode(path).split(b"/")
    if len(os.fsencode(path)) > MAX_PATH_BYTES or max(map(len, parts)) > MAX_NAME_BYTES:
        return f"a path has at most {MAX_PATH_BYTES} bytes, and {MAX_NAME_BYTES} in each of its names"
    return ""


def pattern_problem(pattern: str) -> str:
    """Why this is no regular expression, or an empty text."""
    if len(pattern) > MAX_PATTERN:
        return f"more than {MAX_PATTERN} characters"
    try:
        re.compile(pattern)
    except (re.error, OverflowError) as error:  # the latter for a repetition count
        return str(error)
    return ""

"""Models of the hub as they lie in its cache on this host: `models--<owner>--<name>/snapshots/<commit>`.

huggingface_hub's own layout, read without it: the launcher starts in a blink.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

MAIN = "main"
_COMMIT = re.compile(r"[0-9a-f]{40}")


def home() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return path_of(os.environ.get("HF_HOME") or f"{caches}/huggingface")


def cached_model(name: str) -> Path:
    """Where the cache has all of a model, whether it is there or not. Without links, as huggingface_hub gives paths."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")  # the second is its older name
    cache = path_of(named).resolve() if named else (home() / "hub").resolve()
    return cache / f"models--{name.replace('/', '--')}"


def path_of(text: str) -> Path:
    """As huggingface_hub reads its variables: `~` and `$NAME` stand for what they are."""
    return Path(os.path.expandvars(os.path.expanduser(text)))


def snapshot(name: str, *, commit: str) -> Path:
    """The folder of one commit, there or not."""
    return cached_model(name) / "snapshots" / commit


def is_commit(revision: str) -> bool:
    """Whether it is a whole commit, which never moves."""
    return _COMMIT.fullmatch(revision) is not None


def commit_in_cache(name: str, *, revision: str) -> str:
    """The commit of a branch or tag when it was downloaded last; a commit is its own. Empty when there is none.

    revision: empty: `main`.
    """
    if is_commit(revision):
        return revision
    try:
        commit = (cached_model(name) / "refs" / (revision or MAIN)).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return commit if is_commit(commit) else ""

"""A patch is a record: what it replaces, why, for which version and source exactly, and when it can go.

Trainer and engine both patch, and must not import each other, so the record lives beside the error tree.
A version or a source that does not match raises: there is no "warn and continue".
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from appliance.errors import PatchError


@dataclass(frozen=True)
class Patch:
    """target: `module:qualified.name` of the function or method that is replaced.

    source_sha256: of `inspect.getsource(target)` in the exact `version` of `distribution`.
    """

    name: str
    target: str
    why: str
    upstream: str
    distribution: str
    version: str
    source_sha256: str
    remove_when: str


_APPLIED: dict[str, Patch] = {}


def applied() -> tuple[str, ...]:
    """Names of the patches that are live in this process, sorted."""
    return tuple(sorted(_APPLIED))


def apply_patch(patch: Patch, replacement: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the target by `replacement(original)`. A second call in the same process changes nothing.

    Raises PatchError when the installed version or source is not the one the patch was made for.
    """
    if patch.name in _APPLIED:
        return
    _check_version(patch)
    owner, attribute = _resolve(patch)
    original = getattr(owner, attribute)
    _check_source(patch, original)
    setattr(owner, attribute, replacement(original))
    _APPLIED[patch.name] = patch


def source_hash(target: Callable[..., Any]) -> str:
    """sha256 of the source text of a function or class."""
    return hashlib.sha256(inspect.getsource(target).encode()).hexdigest()


def _check_version(patch: Patch) -> None:
    installed = importlib.metadata.version(patch.distribution)
    if installed != patch.version:
        raise PatchError(
            f"patch {patch.name}: made for {patch.distribution} {patch.version}, {installed} is installed",
            hint="install the locked requirements (make demo does)",
        )


def _check_source(patch: Patch, original: Callable[..., Any]) -> None:
    found = source_hash(original)
    if found != patch.source_sha256:
        raise PatchError(
            f"patch {patch.name}: the source of {patch.target} is not the one it was made for (sha256 {found})",
            hint="reinstall the locked requirements, or renew the patch for the changed source",
        )


def _resolve(patch: Patch) -> tuple[Any, str]:
    module_name, _, qualified = patch.target.partition(":")
    *path, attribute = qualified.split(".")
    owner: Any = importlib.import_module(module_name)
    for part in path:
        owner = getattr(owner, part, None)
    if not hasattr(owner, attribute):
        raise PatchError(f"patch {patch.name}: {patch.target} does not exist")
    return owner, attribute

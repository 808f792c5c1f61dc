"""A patch is a record: what it replaces, why, for which versions and sources exactly, and when it can go.

Trainer and engine both patch, and must not import each other, so the record lives beside the error tree.
A version or a source that does not match raises: there is no "warn and continue".
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.errors import PatchError

_PACKAGE = Path(__file__).parent
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Patch:
    name: str
    target: str
    """`module:qualified.name` of the function or method that is replaced."""
    why: str
    upstream: str
    distribution: str
    sources: Mapping[str, str]
    """SHA-256 of `inspect.getsource(target)` by version of `distribution`. A version that names no build, such as
    `0.28.0`, stands for each build of it, such as `0.28.0+cpu`, as with pip's `==`."""
    remove_when: str


_APPLIED: dict[str, Patch] = {}


def applied_patches() -> tuple[str, ...]:
    """List the names of the patches that are live in this process, sorted."""
    return tuple(sorted(_APPLIED))


def apply_patch(patch: Patch, replacement: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the target by `replacement(original)`. A second call in the same process changes nothing. Raises
    PatchError when the installed version or source is not the one the patch was made for."""
    if patch.name in _APPLIED:
        return
    if why := _other_version(patch):
        raise PatchError(f"patch {patch.name}: {why}", hint="install the locked requirements (make demo does)")
    owner, attribute = _resolve(patch)
    original = getattr(owner, attribute)
    if (found := source_hash(original)) != _expected_hash(patch):
        raise PatchError(
            f"patch {patch.name}: the source of {patch.target} is not the one it was made for (sha256 {found})",
            hint="reinstall the locked requirements, or renew the patch for the changed source",
        )
    setattr(owner, attribute, replacement(original))
    _APPLIED[patch.name] = patch


def source_hash(target: Callable[..., Any]) -> str:
    """Return the SHA-256 of the source text of a function or class."""
    return hashlib.sha256(inspect.getsource(target).encode()).hexdigest()


def installed_version(distribution: str) -> str:
    """Return the installed version with its build, such as `0.28.0+cpu`; `nothing` where the distribution is not
    installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "nothing"


def _expected_hash(patch: Patch) -> str | None:
    """Return the hash of the source in the installed version; None for a version that the patch was not made for."""
    installed = installed_version(patch.distribution)
    return patch.sources.get(installed, patch.sources.get(installed.partition("+")[0]))


def _other_version(patch: Patch) -> str:
    versions, installed = ", ".join(patch.sources), installed_version(patch.distribution)
    made_for = f"made for {patch.distribution} {versions}; {installed} is installed"
    return made_for if _expected_hash(patch) is None else ""


def _resolve(patch: Patch) -> tuple[Any, str]:
    module, _, qualified = patch.target.partition(":")
    path, _, attribute = qualified.rpartition(".")
    importlib.import_module(module)  # its own error is raised as it is
    with contextlib.suppress(AttributeError):
        owner = pkgutil.resolve_name(f"{module}:{path}")
        if hasattr(owner, attribute):
            return owner, attribute
    raise PatchError(f"patch {patch.name}: {patch.target} does not exist")


# Judged by the sources alone: the files with the records, and what they replace, both import torch. So preflight can
# report a library that was changed within a second, where an engine would after minutes on a GPU; a head compares what
# its nodes have; and the records for vLLM's build for GPUs are tested (tests/gpu_lock) on a host where it cannot be
# imported.


@functools.cache
def recorded() -> dict[str, Patch]:
    """Return every patch record of this program by its name."""
    texts = (file.read_text() for file in sorted(_PACKAGE.rglob("*.py")))
    trees = (ast.parse(text) for text in texts if "Patch(" in text)
    calls = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    records = (
        {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == Patch.__name__ and call.keywords[0].arg
    )
    return {fields["name"]: Patch(**fields) for fields in records}


def why_unfit(patch: Patch) -> str:
    """Return the reason why a process would refuse to apply the patch, or an empty text. Imports nothing of what it
    replaces."""
    if why := _other_version(patch):
        return why
    source = source_of(patch.target)
    if source is None:
        return f"{patch.target} does not exist"
    if hashlib.sha256(source.encode()).hexdigest() != _expected_hash(patch):
        return f"the source of {patch.target} is not the one it was made for"
    return ""


def source_of(target: str) -> str | None:
    """Return what inspect.getsource gives for `module:qualified.name`, read from the file; None where there is no such
    thing."""
    module, _, qualified = target.partition(":")
    top, *inner = module.split(".")
    spec = importlib.util.find_spec(top)  # of a top package: imports nothing
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder).joinpath(*inner)
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file.is_file():
            return _definition(file.read_text(), names=qualified.split("."))
    return None


def _definition(text: str, *, names: list[str]) -> str | None:
    """Return a definition's text; of two with one name the last counts, as when the file is run."""
    body, definition = ast.parse(text).body, None
    for name in names:
        matching = [each for each in body if isinstance(each, _DEFINITIONS) and each.name == name]
        if not matching:
            return None
        definition = matching[-1]
        body = definition.body
    assert definition is not None, "a target has a name"
    first = min([definition.lineno, *(each.lineno for each in definition.decorator_list)])
    return "".join(text.splitlines(keepends=True)[first - 1 : definition.end_lineno])

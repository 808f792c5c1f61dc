"""Patch records and their targets, read from sources: what holds them and what they replace both import torch."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path

from appliance import patch

_PACKAGE = Path(patch.__file__).parent
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@functools.cache
def recorded() -> dict[str, patch.Patch]:
    """Every patch record of this program by its name."""
    texts = (file.read_text() for file in sorted(_PACKAGE.rglob("*.py")))
    trees = (ast.parse(text) for text in texts if "source_sha256=" in text)
    calls = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    records = (
        {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == patch.Patch.__name__
    )
    return {fields["name"]: patch.Patch(**fields) for fields in records}


def why_unfit(record: patch.Patch) -> str:
    """Why a process would refuse to apply the patch, or an empty text. Imports nothing of what it replaces."""
    try:
        installed = importlib.metadata.version(record.distribution)
    except importlib.metadata.PackageNotFoundError:
        installed = "nothing"
    if installed != record.version:
        return f"made for {record.distribution} {record.version}, {installed} is installed"
    source = source_of(record.target)
    if source is None:
        return f"{record.target} does not exist"
    if hashlib.sha256(source.encode()).hexdigest() != record.source_sha256:
        return f"the source of {record.target} is not the one it was made for"
    return ""


def source_of(target: str) -> str | None:
    """What inspect.getsource gives for `module:qualified.name`, from the file; None where there is no such thing."""
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
    """Of two definitions with one name the last counts, as when the file is run."""
    body, found = ast.parse(text).body, None
    for name in names:
        matching = [each for each in body if isinstance(each, _DEFINITIONS) and each.name == name]
        if not matching:
            return None
        found = matching[-1]
        body = found.body
    assert found is not None, "a target has a name"
    first = min([found.lineno, *(each.lineno for each in found.decorator_list)])
    return "".join(text.splitlines(keepends=True)[first - 1 : found.end_lineno])

"""The wheel `flashrl-compat`: of the packages beside this folder the modules that the plugin reaches, and no other."""

from __future__ import annotations

import ast
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

TREE = os.path.relpath(Path(__file__).resolve().parents[1])
ROOTS = ("flashrl_compat.plugin", "flashrl_compat.sender")  # vLLM's entry point, and what a trainer imports
PACKAGES = ("appliance", "flashrl_compat")
_NAME = re.compile(rf"({'|'.join(PACKAGES)})(\.\w+)+")


def modules() -> set[str]:
    """List the full names of all modules that the roots import, at any depth, or name in a text, as vLLM's settings
    name a worker. Ends the build where the packages are not there: it would make an empty wheel."""
    if missing := [name for name in PACKAGES if not file_of(name)]:
        sys.exit(
            f"error: {Path(TREE).resolve()}: {', '.join(missing)}: not there; flashrl-compat is made of the modules "
            "beside its folder\n"
            "hint: build it in a clone of the repository, or let pip make one: "
            '`pip install "git+URL-OF-THE-REPOSITORY#subdirectory=plugin"`'
        )
    names, waiting = set[str](), list(ROOTS)
    while waiting:
        name = waiting.pop()
        if name not in names and name.startswith(PACKAGES) and (file := file_of(name)):
            names.add(name)
            waiting += [name.rpartition(".")[0], *imported_names(ast.parse(file.read_text()))]
    return names


def imported_names(tree: ast.Module) -> Iterator[str]:
    """List what may be a module: of `from a import b` both `a` and `a.b`, of a text with dots its longest
    beginnings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Constant) and _NAME.fullmatch(str(node.value)):
            yield from (node.value, node.value.rpartition(".")[0])


def file_of(module: str) -> Path | None:
    path = Path(TREE, *module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


if __name__ == "__main__":
    from setuptools import setup

    with tempfile.TemporaryDirectory() as traces:  # nothing of a build stays in the tree, to be packed by the next one
        setup(
            py_modules=sorted(modules()),
            package_dir={"": TREE},
            options={"build": {"build_base": traces}, "egg_info": {"egg_base": traces}},
        )

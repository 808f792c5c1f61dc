"""The page about preflight has every finding."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
CODE_AT = {"Finding": 1, "error": 0, "warning": 0}  # the place of a code among the arguments


def codes(tree: ast.Module) -> Iterator[str]:
    """Yield the codes, which may be constants of the module."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CODE_AT:
            argument = node.args[CODE_AT[node.func.id]]
            argument = constants.get(argument.id, argument) if isinstance(argument, ast.Name) else argument
            if isinstance(argument, ast.Constant):
                yield argument.value


def test_the_page_has_every_code_of_a_finding() -> None:
    page = (ROOT / "docs" / "preflight.md").read_text()
    files = [*(ROOT / "appliance" / "preflight").glob("*.py"), ROOT / "appliance" / "launch" / "resume.py"]
    known = {code for file in files for code in codes(ast.parse(file.read_text()))}
    assert len(known) > 40
    assert {code for code in known if f"`{code}`" not in page} == set()

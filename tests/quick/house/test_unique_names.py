"""A public class's name means one thing: no two modules of the program define one of the same name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

FOLDERS = ("appliance", "flashrl_compat")
SHARED: dict[str, str] = {}
"""Names that several classes have, each with the reason."""


def classes(text: str) -> list[str]:
    """Names of the public classes of a module, also of those within functions and classes."""
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))
    return [node.name for node in nodes if not node.name.startswith("_")]


def shared(texts: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names that are defined more than once, with their places. texts: (place, source) of each module."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for place, text in texts:
        for name in classes(text):
            places[name].append(place)
    return {name: at for name, at in places.items() if len(at) > 1}


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ("class A: pass", "class B: pass", []),
        ("class A: pass", "class A: pass", ["A"]),
        ("class A: pass", "def f():\n class A: pass", ["A"]),
        ("class _A: pass", "class _A: pass", []),
        ("class A: pass", "from first import A", []),
        ("class A: pass\nclass A: pass", "", ["A"]),
    ],
)
def test_a_name_is_shared_by_classes_of_two_modules(first: str, second: str, names: list[str]) -> None:
    assert [*shared([("first", first), ("second", second)])] == names


def test_a_public_class_has_its_name_alone(root: Path, record_property: Callable[[str, object], None]) -> None:
    files = [file for folder in FOLDERS for file in sorted((root / folder).rglob("*.py"))]
    texts = [(str(file.relative_to(root)), file.read_text()) for file in files]
    count = sum(len(classes(text)) for _, text in texts)
    record_property("said", f"names: {count} public classes, {len(SHARED)} names that several have")
    assert count > 100
    twice = shared(texts)
    assert {name: places for name, places in twice.items() if name not in SHARED} == {}
    assert [name for name in SHARED if name not in twice] == [], "these are unique by now"

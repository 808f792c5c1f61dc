"""What the docstring of a public function begins with: what the function does."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

FOLDERS = ("appliance", "flashrl_compat")
NO_VERBS = {
    *("A", "An", "The", "This", "These", "That", "Those", "One", "Each", "Every", "All", "Some", "No", "None", "Both"),
    *("What", "Which", "Who", "Whether", "Where", "When", "While", "Why", "How", "As", "If", "It", "There"),
    *("After", "At", "Before", "Between", "By", "For", "From", "In", "Of", "On", "Over", "To", "Up", "With", "Without"),
}
"""Articles, pronouns, conjunctions and prepositions: nobody can list all nouns, which are as wrong."""


def first_words(text: str) -> Iterator[tuple[str, str]]:
    """(function, first word of its docstring) for the public functions and methods of a module, but its properties."""

    def within(node: ast.AST, title: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or child.name[0] == "_":
                continue
            if isinstance(child, ast.ClassDef):
                yield from within(child, f"{title}{child.name}.")
            elif not any("property" in ast.unparse(decorator) for decorator in child.decorator_list):
                words = (ast.get_docstring(child) or "").split()
                yield from [(f"{title}{child.name}", words[0].rstrip(",:;."))] if words else ()

    return within(ast.parse(text), "")


def is_verb(word: str) -> bool:
    """Whether it may be one. A verb of another form (`Returns`) is none, nor is a plural."""
    is_word = word.replace("-", "").isalpha()
    return is_word and word not in NO_VERBS and (not word.endswith("s") or word.endswith("ss"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(): 'Return it.'", ["Return"]),
        ("async def f(): 'Return, by name, it.'", ["Return"]),
        ("class A:\n def f(self): 'The sum.'", ["The"]),
        ("class A:\n @property\n def f(self): 'Sum.'", []),
        ("class A:\n @cached_property\n def f(self): 'Sum.'", []),
        ("class _A:\n def f(self): 'The sum.'", []),
        ("def _f(): 'The sum.'\ndef g(): pass", []),
        ("def f():\n def g(): 'The sum.'", []),
    ],
)
def test_first_words_are_of_public_functions(text: str, words: list[str]) -> None:
    assert [word for _, word in first_words(text)] == words


@pytest.mark.parametrize(
    ("word", "is_one"),
    [
        ("Return", True),
        ("Pass", True),
        ("Whether", False),
        ("Cores", False),
        ("Returns", False),
        ("`max`", False),
        ("Warm-start", True),
    ],
)
def test_a_word_that_begins_is_a_verb(word: str, is_one: bool) -> None:
    assert is_verb(word) is is_one


def test_the_docstring_of_a_public_function_begins_with_a_verb(
    root: Path, record_property: Callable[[str, object], None]
) -> None:
    files = [file for folder in FOLDERS for file in sorted((root / folder).rglob("*.py"))]
    words = {
        f"{file.relative_to(root)}: {name}": word for file in files for name, word in first_words(file.read_text())
    }
    record_property("said", f"docstrings: {len(words)} public functions begin theirs with what they do")
    assert len(words) > 1000
    assert {place: word for place, word in words.items() if not is_verb(word)} == {}

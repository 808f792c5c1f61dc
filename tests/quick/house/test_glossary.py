"""docs/glossary.md has every word that it must have, and none that nobody uses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from appliance.guard.governor import Rung
from appliance.terms.schemes import Scheme

PLAIN = {"keep", "compute"}  # italics of docs/concepts.md for stress alone
BASE_FORMS = {"acknowledges": "acknowledgement", "rollout engine": "engine", "weight update": "sync"}


@pytest.fixture(scope="module")
def glossary(root: Path) -> str:
    return (root / "docs/glossary.md").read_text()


def terms(glossary: str) -> list[str]:
    """The words in bold, one by one: `mask` of `**mask**`, `k1` and `k3` of `**k1, k3**`."""
    return [term.strip("`") for bold in re.findall(r"\*\*([^*]+)\*\*", glossary) for term in bold.split(", ")]


def listed(glossary: str, *, term: str) -> list[str]:
    """What an entry has in backticks."""
    _, _, entry = glossary.partition(f"\n**{term}**: ")
    return re.findall(r"`([^`]+)`", entry.partition("\n\n")[0])


def plain(text: str) -> str:
    """In small letters, with a space for `_` and for any white space."""
    return re.sub(r"[\s_]+", " ", text).lower()


def test_every_scheme_is_in_its_entry(glossary: str) -> None:
    assert listed(glossary, term="scheme") == [*Scheme, "auto"]


def test_every_level_of_the_guard_is_in_its_entry(glossary: str) -> None:
    assert listed(glossary, term="guard level") == [rung.value for rung in Rung]


def test_every_word_that_the_concepts_introduce_has_an_entry(root: Path, glossary: str) -> None:
    concepts = (root / "docs/concepts.md").read_text()
    introduced = {" ".join(word.split()) for word in re.findall(r"\*\*?([a-z][\w -]*)\*\*?", concepts)} - PLAIN
    assert len(introduced) > 20
    assert sorted(word for word in introduced if BASE_FORMS.get(word, word) not in terms(glossary)) == []


def test_every_entry_is_used_on_another_page(root: Path, glossary: str) -> None:
    pages = [page for page in (root / "docs").glob("*.md") if page.name != "glossary.md"]
    text = plain("\n".join(page.read_text() for page in [root / "README.md", *pages]))
    assert [term for term in terms(glossary) if not re.search(rf"\b{re.escape(plain(term))}", text)] == []


def test_no_word_has_two_entries(glossary: str) -> None:
    words = terms(glossary)
    assert sorted({word for word in words if words.count(word) > 1}) == []

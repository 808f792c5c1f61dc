"""A number with its noun."""

from __future__ import annotations

import pytest

from appliance.terms.counts import counted


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 entries are left"), (1, "1 entry is left"), (2, "2 entries are left")]
)
def test_a_noun_agrees_with_its_number(number: int, text: str) -> None:
    assert counted(number, "entry is left", plural="entries are left") == text


def test_most_plurals_have_an_s() -> None:
    assert [counted(number, "step") for number in (1, 12)] == ["1 step", "12 steps"]

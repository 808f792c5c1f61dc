"""What a truth or a response answers, before anything is compared."""

from __future__ import annotations

import pytest

from appliance.tasks.answers import truth_alternatives


@pytest.mark.parametrize(
    ("truth", "alternatives"),
    [
        ('["0", "1"]', ("0", "1")),
        (' [" a ", "b", "b", " "] ', (" a ", "b")),
        ("[0,1]", ("[0,1]",)),
        ('["0", 1]', ('["0", 1]',)),
        ("[]", ("[]",)),
        ('["", " "]', ('["", " "]',)),
        ('{"a": "b"}', ('{"a": "b"}',)),
        ("[" * 100_000, ("[" * 100_000,)),
        ("", ("",)),
        ("42", ("42",)),
    ],
)
def test_a_json_list_of_texts_is_any_of_them(truth: str, alternatives: tuple[str, ...]) -> None:
    assert truth_alternatives(truth) == alternatives

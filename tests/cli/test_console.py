"""What goes to stdout where its encoding lacks a character: a log of a run may hold any."""

import io
import sys

import pytest

from appliance import console


@pytest.mark.parametrize(
    ("encoding", "written"), [("ascii", "\\xe9 \\u2588\n"), ("latin-1", "é \\u2588\n"), ("utf-8", "é █\n")]
)
def test_a_character_that_stdout_lacks_is_escaped(monkeypatch, encoding, written):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    console.out("é █")
    assert raw.getvalue().decode(encoding) == written

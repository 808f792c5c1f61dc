"""In which order the files of a run are dealt to its workers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from two_workers import trainings_first


def test_long_trainings_come_first_and_then_what_has_engines() -> None:
    marks = {
        "a": [],
        "b": [pytest.mark.engine.mark],
        "c": [pytest.mark.e2e.mark],
        "d": [],
        "e": [pytest.mark.e2e(minutes=3).mark],
        "f": [pytest.mark.engine.mark],
    }
    items = [SimpleNamespace(path=Path(name), iter_markers=lambda own=own: own) for name, own in marks.items()]
    items.append(SimpleNamespace(path=Path("f"), iter_markers=lambda: [pytest.mark.e2e(minutes=2).mark]))
    assert "".join(str(item.path) for item in trainings_first(items)) == "effcbad"

"""The profile of `make fuzz`, the marker of everything here, and the table of what was run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fuzz_surface as surface
import pytest
from hypothesis import settings
from rich.cells import cell_len
from two_workers import tell

from appliance.recipe.schema import Recipe

settings.register_profile(surface.LONG)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.fuzz)


@pytest.fixture(scope="session", autouse=True)
def warm() -> None:
    """What pydantic and rich import at their first use is no import that a file asked for."""
    Recipe.model_json_schema()
    cell_len("\u6f22")


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Path]:
    """The folder of a surface's cases, which write the same files in it again and again."""
    inside = tmp_path / "room"
    inside.mkdir()
    yield inside
    assert sorted(path.name for path in tmp_path.iterdir()) == ["room"], "something was written beside the room"


def pytest_sessionfinish(session: pytest.Session) -> None:
    if surface.counted:
        tell(session.config, fuzz=["fuzz: cases by surface", *surface.table()])

"""What is here needs no torch: `make quick` stays quick."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    """But for tests that are marked, which `make quick` leaves out, and where another folder has loaded it before."""
    had_it = "torch" in sys.modules
    yield
    marked = any(request.node.get_closest_marker(name) for name in ("slow", "engine"))
    assert had_it or marked or "torch" not in sys.modules, "this test loads torch: it belongs to tests/parts"


@pytest.fixture
def no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preflight without its children: the one that tries the rewards (0.3 s each; test_preflight_sample.py has it), the
    one that tries a chat template (2 s; tests/parts/tasks/test_tasks_templates.py) and the one that holds weights
    against config.json (seconds; tests/parts/preflight)."""
    monkeypatch.setattr("appliance.preflight.inputs.reward_problem", lambda _: None)
    monkeypatch.setattr("appliance.preflight.template.TemplateChild.start", lambda *_: None)
    monkeypatch.setattr("appliance.preflight.weights.WeightsChild.start", lambda *_, **__: None)

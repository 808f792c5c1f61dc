"""Who imports ahead of the rollout server, and who only runs the task that brings that process about."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from appliance.plan.env import AHEAD_VARIABLE, RAY_DIR_VARIABLE
from appliance.trainer import ahead


def test_each_ticket_goes_to_one(tmp_path: Path) -> None:
    for number in range(20):
        tmp_path.joinpath(f"ticket-{number}").touch()
    with ThreadPoolExecutor(16) as threads:
        got = list(threads.map(lambda _: ahead.has_ticket(tmp_path), range(50)))
    assert (sum(got), list(tmp_path.iterdir())) == (20, [])


@pytest.mark.parametrize(
    ("mark", "tickets", "imported"),
    [
        pytest.param("1", 0, ["verl.workers.rollout.vllm_rollout.vllm_async_server"], id="no ticket left"),
        pytest.param("1", 1, [], id="a ticket"),
        pytest.param(None, 0, [], id="another worker"),
    ],
)
def test_what_a_worker_imports_before_its_first_work(
    mark: str | None, tickets: int, imported: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(tickets):
        tmp_path.joinpath(f"ticket-{number}").touch()
    monkeypatch.setenv(RAY_DIR_VARIABLE, str(tmp_path))
    monkeypatch.delenv(AHEAD_VARIABLE, raising=False)
    if mark:
        monkeypatch.setenv(AHEAD_VARIABLE, mark)
    asked: list[str] = []
    monkeypatch.setattr(importlib, "import_module", asked.append)
    importlib.reload(ahead)
    assert asked == imported

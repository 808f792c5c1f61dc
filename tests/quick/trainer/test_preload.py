"""Who imports ahead of the rollout server."""

from __future__ import annotations

import importlib

import pytest

from appliance.terms.environment import PRELOAD_VARIABLE
from appliance.trainer import preload


@pytest.mark.parametrize("has_mark", [True, False])
def test_only_a_process_for_servers_imports_before_its_first_work(
    has_mark: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PRELOAD_VARIABLE, raising=False)
    if has_mark:
        monkeypatch.setenv(PRELOAD_VARIABLE, "1")
    asked: list[str] = []
    monkeypatch.setattr(importlib, "import_module", asked.append)
    importlib.reload(preload)
    assert asked == ["verl.workers.rollout.vllm_rollout.vllm_async_server"] * has_mark

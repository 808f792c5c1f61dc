"""The version of the weights in a server's metrics, whatever its engine says; of a real one: test_flashrl_serve.py."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from prometheus_client import make_asgi_app
from starlette.testclient import TestClient
from vllm.v1.engine.exceptions import EngineDeadError

from flashrl_compat import metrics


def scraped(version: object, *, root_path: str = "", path: str = "/metrics") -> float:
    """version: what the engine says, an error that it raises, or a time in seconds that it takes."""

    async def get_weight_version() -> object:
        if isinstance(version, Exception):
            raise version
        if isinstance(version, float):
            await asyncio.sleep(version)
        return version

    app = FastAPI(root_path=root_path)
    metrics._with_version(lambda app: app.mount("/metrics", make_asgi_app()))(app)  # a second app in this process, too
    app.state.engine_client = version and SimpleNamespace(get_weight_version=get_weight_version)
    answer = TestClient(app, root_path=root_path).get(path)
    assert answer.status_code == 200
    [value] = [line.split()[1] for line in answer.text.splitlines() if line.startswith(f"{metrics.METRIC} ")]
    return float(value)


@pytest.mark.parametrize(("version", "told"), [("default", 0), ("3", 3), (5, 5)])
def test_a_number_is_told(version: object, told: float) -> None:
    assert scraped(version) == told
    assert scraped("7", root_path="/api", path="/api/metrics") == 7


@pytest.mark.parametrize("version", ["step-7", None, EngineDeadError(), 60.0])
def test_what_is_no_number_leaves_the_other_metrics(version: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "ANSWERS_WITHIN_S", 0.05)
    assert math.isnan(scraped(version))

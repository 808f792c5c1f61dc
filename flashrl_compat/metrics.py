"""Routes of an API server under FLASHRL_CONFIG: `/metrics` shows the version of the weights, as `GET /weight_info`
does; `/weight_checker` compares them; `/inference/v1/generate` says which version sampled each token.

vLLM's hook for middleware is an option of its command line, and its plugins for endpoints are left out unless
VLLM_PLUGINS names them: hence a patch.
"""

from __future__ import annotations

import asyncio
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from appliance.patch import Patch, apply_patch

ROUTES = Patch(
    name="flashrl-metrics-tell-the-version",
    target="vllm.entrypoints.serve.instrumentator.metrics:attach_router",
    why="vLLM's metrics do not say which weights a server has, and what it measures is of these",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/entrypoints/serve/instrumentator/metrics.py",
    distribution="vllm",
    sources={
        "0.28.0": "505274300362a4800365da4263dd43e0abf251bee3f8cb3947dfc1cdffbfa925",
        "0.29.0": "505274300362a4800365da4263dd43e0abf251bee3f8cb3947dfc1cdffbfa925",
        "0.30.0": "505274300362a4800365da4263dd43e0abf251bee3f8cb3947dfc1cdffbfa925",
        "0.31.0": "ea7384a6dda3e53dd09d1696c5517610937dea84d795acabe61d29106541d07e",
    },
    remove_when="vLLM has a metric of its weight version",
)
# Of which API servers alone import one, however they are started; in vLLM 0.28 it is the second.
LAUNCHERS = ("vllm.entrypoints.launchers.launcher", "vllm.entrypoints.launcher")
METRIC = "flashrl:weight_version"
MEANS = (
    "Version of the weights, as in GET /weight_info: 0 before the first update; "
    "NaN: it is no number, or the engine did not answer within 2 s"
)
ANSWERS_WITHIN_S = 2.0


def patch_routes() -> None:
    """Patch the routes in API servers alone: nobody else has their modules, which are slow to import. Raises
    PatchError."""
    if any(launcher in sys.modules for launcher in LAUNCHERS):
        from flashrl_compat.generate_route import patch_generate_route

        apply_patch(ROUTES, _with_version)
        patch_generate_route()


def _with_version(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def attach_router(app: Any) -> None:
        from flashrl_compat.weight_checker import add_weight_checker  # FastAPI, which no engine needs

        original(app)
        app.add_middleware(_Asking, gauge=_gauge())
        add_weight_checker(app)

    return attach_router


@functools.cache
def _gauge() -> Any:
    from prometheus_client import Gauge  # slow, and in a server it is there

    return Gauge(METRIC, MEANS, multiprocess_mode="mostrecent")


@dataclass(frozen=True)
class _Asking:
    """ASGI middleware that asks the engine before the metrics are read."""

    app: Any
    gauge: Any

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        root = scope.get("root_path", "")
        if scope["type"] == "http" and scope["path"].startswith((f"{root}/metrics", "/metrics")):
            self.gauge.set(await _version(getattr(scope["app"].state, "engine_client", None)))
        await self.app(scope, receive, send)


async def _version(engine: Any) -> float:
    """engine: None: a server that only renders."""
    from vllm.v1.engine.exceptions import EngineDeadError

    if engine is None:
        return math.nan
    try:
        version = str(await asyncio.wait_for(engine.get_weight_version(), ANSWERS_WITHIN_S))
    except (TimeoutError, EngineDeadError):  # the other metrics are wanted all the more
        return math.nan
    return 0.0 if version == "default" else float(version) if version.isdecimal() else math.nan

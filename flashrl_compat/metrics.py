"""`/metrics` of an API server under FLASHRL_CONFIG says the version of the weights, as `GET /weight_info` does.

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

from appliance.patch import Patch
from flashrl_compat.patches import apply_here

ROUTES = Patch(
    name="flashrl-metrics-tell-the-version",
    target="vllm.entrypoints.serve.instrumentator.metrics:attach_router",
    why="vLLM's metrics do not say which weights a server has, and what it measures is of these",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/entrypoints/serve/instrumentator/metrics.py",
    distribution="vllm",
    version="0.28.0+cpu",
    source_sha256="505274300362a4800365da4263dd43e0abf251bee3f8cb3947dfc1cdffbfa925",
    remove_when="vLLM has a metric of its weight version",
)
SERVERS_OWN = "vllm.entrypoints.launcher"  # API servers alone import it, however they are started
METRIC = "flashrl:weight_version"
MEANS = "As in GET /weight_info, 0 before the first update; NaN: no number, or the engine did not answer within 2 s"
ANSWERS_WITHIN_S = 2.0


def patch_metrics() -> None:
    """In API servers alone: nobody else has their modules, which are slow to import. Raises PatchError."""
    if SERVERS_OWN in sys.modules:
        apply_here(ROUTES, _with_version)


def _with_version(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def attach_router(app: Any) -> None:
        original(app)
        app.add_middleware(_Asking, gauge=_gauge())

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

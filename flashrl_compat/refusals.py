"""Where an engine gets requests under FLASHRL_CONFIG: what its core refused (core.py) is an error that says why.

Over HTTP it is vLLM's own error body, with status 503. vLLM itself would say "Internal server error", or return an
output without tokens.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any

from vllm.outputs import RequestOutput
from vllm.v1.engine import EngineCoreOutput, FinishReason

from appliance.errors import SyncError
from appliance.patch import Patch, apply_patch
from flashrl_compat.core import settle

ASYNC = Patch(
    name="flashrl-server-says-why",
    target="vllm.v1.engine.async_llm:AsyncLLM.generate",
    why="vLLM does not tell the caller why its core refused a request",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/v1/engine/async_llm.py",
    distribution="vllm",
    sources={
        "0.28.0": "e7ef61c7c4809e3080586d7d33fa2bd7a718861aaba49b20f4b8bfb1657e8147",
        "0.29.0": "fffe7dd5ead760c3998bd522555355e79b726995c5bad7bb97c4a3c6c6ab4712",
        "0.30.0": "e2441d530286fe68c2f6b0a1974bc8db24a5ea73b7cba700ab55787917184cfa",
        "0.31.0": "5bd0ee90459b0e29348891b03548cdc31eef8c9218b3c416d5df4e5e14d1bca2",
    },
    remove_when="vLLM's core says with an error what was wrong",
)
STEP = Patch(
    name="flashrl-engine-says-why",
    target="vllm.v1.engine.llm_engine:LLMEngine.step",
    why="LLM returns an output without tokens for a request that a core in another process did not take",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/v1/engine/llm_engine.py",
    distribution="vllm",
    sources={
        "0.28.0": "ae4d1a3f8c737169fb99d9c65b78b32f69bbf3dbb819e14532a25b66982bcd68",
        "0.29.0": "ae4d1a3f8c737169fb99d9c65b78b32f69bbf3dbb819e14532a25b66982bcd68",
        "0.30.0": "ae4d1a3f8c737169fb99d9c65b78b32f69bbf3dbb819e14532a25b66982bcd68",
        "0.31.0": "ae4d1a3f8c737169fb99d9c65b78b32f69bbf3dbb819e14532a25b66982bcd68",
    },
    remove_when="LLMEngine raises what its core refuses",
)
ADD = Patch(
    name="flashrl-engine-forgets-refused-requests",
    target="vllm.v1.engine.llm_engine:LLMEngine.add_request",
    why="vLLM waits for ever for a request that a core in the same process did not take",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/v1/engine/llm_engine.py",
    distribution="vllm",
    sources={
        "0.28.0": "f7b2dcc28fd156e809d9a8723523dfba7dcdf656082ac2d98bfff15907d7e190",
        "0.29.0": "bcb9f4314bc639550d4adafd5a6551d9d853b203ed867ec17644e124d86d810c",
        "0.30.0": "bcb9f4314bc639550d4adafd5a6551d9d853b203ed867ec17644e124d86d810c",
        "0.31.0": "200427fff0426c2c30088572b498daab49d015de75e7bdc6d2d3e3ef5f06479e",
    },
    remove_when="LLMEngine.add_request takes a request back that its core refuses",
)


def patch_refusals() -> None:
    """Patch what asks the core. Raises PatchError."""
    apply_patch(ASYNC, _says_why)
    apply_patch(STEP, _raises_why)
    apply_patch(ADD, _forgets)


def _refused(output: Any) -> str:
    """Return the reason why the core took no request, or an empty text: vLLM's own errors have no reason."""
    outputs = output.outputs if isinstance(output, RequestOutput) else ()  # a pooling request's has no reason
    answers = (each for each in outputs if each.finish_reason == "error")
    return next((each.stop_reason for each in answers if isinstance(each.stop_reason, str)), "")


def _says_why(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def generate(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        generation_error = _generation_error()

        async with contextlib.aclosing(original(self, *args, **kwargs)) as outputs:
            async for output in outputs:
                if why := _refused(output):
                    refusal = generation_error(why)
                    refusal.status_code = HTTPStatus.SERVICE_UNAVAILABLE
                    raise refusal
                yield output

    return generate


def _generation_error() -> type[Exception]:
    """vLLM's, which a server answers with its own error body."""
    try:
        from vllm.exceptions import GenerationError
    except ImportError:  # slow, and in a server it is there. Remove when: vLLM 0.28 is not served
        from vllm.entrypoints.openai.engine.protocol import GenerationError
    return GenerationError


def _raises_why(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Any) -> list[Any]:
        core = getattr(self.engine_core, "engine_core", None)  # in this process
        if core is not None:
            settle(core)
        outputs = original(self)
        if why := next(filter(None, map(_refused, outputs)), ""):
            self.abort_request(list(self.output_processor.request_states), True)  # no later call waits for them
            raise SyncError(why)
        return outputs if core is None else [*outputs, *_ended(self, core)]

    return step


def _ended(engine: Any, core: Any) -> list[Any]:
    """What an update has aborted, as a core in another process says itself."""
    ids = [each for each in engine.output_processor.request_states if each not in core.scheduler.requests]
    ended = [EngineCoreOutput(each, [], finish_reason=FinishReason.ABORT) for each in ids]
    outputs: list[Any] = engine.output_processor.process_outputs(ended).request_outputs
    return outputs


def _forgets(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_request(self: Any, *args: Any, **kwargs: Any) -> str:
        try:
            return original(self, *args, **kwargs)
        except SyncError:  # of a core in this process
            taken = self.engine_core.engine_core.scheduler.requests
            self.abort_request([each for each in self.output_processor.request_states if each not in taken], True)
            raise

    return add_request

"""`weight_versions` in the answers of `POST /inference/v1/generate`, as in vLLM 0.32 (weight_versions.py): in each
choice, and in a stream in each part of one, where it is null before the last."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateResponse, GenerateResponseChoice

from appliance.patch import Patch, apply_patch
from flashrl_compat.weight_versions import WeightVersionSpan

WHOLE = Patch(
    name="flashrl-generate-has-versions",
    target="vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens.serve_tokens_full_generator",
    why="an answer over HTTP does not say which version of the weights sampled its tokens",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/entrypoints/scale_out/token_in_token_out/serving.py",
    distribution="vllm",
    sources={
        "0.28.0": "a9b43e3c3bb380be3ac9b99499e9e9733f2715eff4a7516e07b7b166d893a8cb",
        "0.29.0": "45331a52dab37a9f20408fb9aaa7f7bbebfc65d78adf85d7cbfb2bb629470a96",
        "0.30.0": "6a833e7847bd34b2b0cf284b736c14816d6f466cbbaa1cc278d67b1dbc40aae0",
        "0.31.0": "25351785e06ea36c0ef96148ac1a51e41eea07fd1519ee32d9cb6653f50c9224",
    },
    remove_when="vLLM 0.32 is the oldest version that the plugin serves",
)
STREAM = Patch(
    name="flashrl-generate-streams-versions",
    target="vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens.serve_tokens_stream_generator",
    why="a stream over HTTP does not say which version of the weights sampled its tokens",
    upstream="https://github.com/vllm-project/vllm/blob/v0.28.0/vllm/entrypoints/scale_out/token_in_token_out/serving.py",
    distribution="vllm",
    sources={
        "0.28.0": "db0677739d89cc26adbca20e16daedcd7c691ce874a9c35cf828b9e26bf16559",
        "0.29.0": "db0677739d89cc26adbca20e16daedcd7c691ce874a9c35cf828b9e26bf16559",
        "0.30.0": "0797fab0da84810506da95634841c2ade4c75d732ab8b6edc404305b1ee77333",
        "0.31.0": "4ec8f8d0e39b9fe87f80abea019188a7403321111eafd583906765e0f1bddc0a",
    },
    remove_when="vLLM 0.32 is the oldest version that the plugin serves",
)


class VersionedChoice(GenerateResponseChoice):
    weight_versions: list[WeightVersionSpan] | None = None


class VersionedResponse(GenerateResponse):
    choices: list[VersionedChoice]


Spans = dict[int, list[WeightVersionSpan] | None]
"""The spans of each choice that has ended, by its index."""


def patch_generate_route() -> None:
    """Patch the route's answers. Raises PatchError."""
    apply_patch(WHOLE, _with_versions)
    apply_patch(STREAM, _streams_versions)


async def _noting_spans(outputs: AsyncIterator[Any], spans: Spans) -> AsyncIterator[Any]:
    async for output in outputs:
        for completion in output.outputs:
            if completion.finish_reason is not None:
                spans[completion.index] = completion.weight_versions
        yield output


def _with_versions(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def serve_tokens_full_generator(self: Any, request: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        spans: Spans = {}
        response = await original(self, request, _noting_spans(outputs, spans), *args, **kwargs)
        if not isinstance(response, GenerateResponse):  # an error
            return response
        choices = [
            VersionedChoice.model_construct(**dict(choice), weight_versions=spans.get(choice.index))
            for choice in response.choices
        ]
        return VersionedResponse.model_construct(**(dict(response) | {"choices": choices}))

    return serve_tokens_full_generator


def _streams_versions(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def serve_tokens_stream_generator(
        self: Any, request: Any, outputs: Any, *args: Any, **kwargs: Any
    ) -> AsyncIterator[str]:
        spans: Spans = {}
        async for event in original(self, request, _noting_spans(outputs, spans), *args, **kwargs):
            yield with_spans(event, spans)

    return serve_tokens_stream_generator


def with_spans(event: str, spans: Spans) -> str:
    """Return a server-sent event with the spans of the choices in it; the stream's end, its usage and errors have no
    choices and stay as they are."""
    text = event.removeprefix("data: ").strip()
    part = json.loads(text) if text.startswith("{") else {}
    if not part.get("choices"):
        return event
    for choice in part["choices"]:
        ended = spans.get(choice["index"]) if choice["finish_reason"] is not None else None
        choice["weight_versions"] = None if ended is None else [asdict(span) for span in ended]
    return f"data: {json.dumps(part, separators=(',', ':'), ensure_ascii=False)}\n\n"

"""What the plugin replaces in vLLM while updates of another trainer come in."""

from __future__ import annotations

import pytest


def put_back_at_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have vLLM's own functions, and the field of its outputs, at the end of the test. Imports vLLM."""
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    for owner, *names in (
        (EngineCore, "collective_rpc", "reset_prefix_cache", "add_request", "resume_scheduler"),
        (EngineCore, "_attach_iteration_details"),
        (LLMEngine, "add_request", "step"),
        (AsyncLLM, "generate"),
        (OutputProcessor, "process_outputs"),
        (RequestState, "_new_completion_output"),
        (RequestOutput, "add"),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(CompletionOutput, "weight_versions", None, raising=False)

"""What a model says of tools: whatever it is, the run goes on, and masks, log-probs and the budget hold."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fuzz_surface import attempt, fuzzed
from fuzz_text import VARIANTS, as_json, broken, raw, seeds, tokens_of, values, variants
from hypothesis import strategies as st

from appliance.tasks.tools import ToolAnswer, call_tool
from appliance.trainer.turns import Opening, Trajectory, Turns

ROUNDS, TOKENS = 3, 100
TOOLS = """
def multiply(a: int, b: int = 2) -> int:
    return a * b
def echo(it: dict | list | str) -> str:
    return it
"""
GOOD = '<tool_call>{"name": "multiply", "arguments": {"a": 37, "b": 58}}</tool_call>'
WORDS = [
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "<|im_end|>",
    '{"name": "echo", "arguments": ',
    "}",
    "multiply",
]
calls = st.builds(
    lambda name, given: f"<tool_call>{as_json({'name': name, 'arguments': given})}</tool_call>".encode(),
    st.one_of(st.sampled_from(["multiply", "echo"]), values),
    st.one_of(values, values.map(lambda wild: {"it": wild}), values.map(lambda wild: {"a": wild})),
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("code") / "tools.py"
    path.write_text(TOOLS)
    return path


@pytest.fixture(scope="module")
def tokenizer(file: Path) -> Any:
    """What is compiled at its first use is nothing that a text asked for."""
    from appliance.tasks.tiny_model import byte_tokenizer

    made = byte_tokenizer(max_positions=100_000, calls_tools=True)
    assert played([GOOD], tokenizer=made, file=file).calls == 1
    return made


def played(texts: list[str], *, tokenizer: Any, file: Path) -> Trajectory:
    """One sample whose engine says the texts in turn, again and again."""
    lines = itertools.cycle(texts)

    async def call(name: str, arguments: str) -> ToolAnswer:
        return call_tool(str(file), None, name, arguments)

    async def ask(prompts: list[list[int]], **asked: Any) -> AsyncIterator[tuple[int, Any]]:
        room = TOKENS - (asked.get("already") or [0])[0]
        ids = [*tokenizer(next(lines))["input_ids"], tokenizer.eos_token_id]
        cut = ids[:room]
        yield (
            0,
            SimpleNamespace(
                samples=[
                    SimpleNamespace(
                        token_ids=cut,
                        log_probs=[-1.0] * len(cut),
                        finished=len(cut) == len(ids),
                        top=None,
                        support=None,
                    )
                ],
                weights_version=1,
            ),
        )

    async def play() -> Trajectory:
        how = {"schemas": [], "max_turns": ROUNDS, "max_tokens": TOKENS, "call": call}
        turns = Turns(tokenizer, model_type="qwen2", **how)
        openings = [Opening([{"role": "user", "content": "2*3"}], [1, 2, 3], None)]
        ((_, group),) = [found async for found in turns.play(openings, ask=ask, num_samples=1)]
        return group.samples[0]

    return asyncio.run(play())


@fuzzed(
    "turns", variants=VARIANTS, seed=seeds, content=st.one_of(raw, broken([GOOD, GOOD * 3]), tokens_of(WORDS), calls)
)
def test_fuzz_turns(room: Path, file: Path, tokenizer: Any, content: bytes, seed: int) -> None:
    for variant in variants(content, seed):
        text = variant.decode(errors="replace")
        spoken = attempt("turns", lambda: played([text, GOOD], tokenizer=tokenizer, file=file), folder=room)  # noqa: B023
        assert len(spoken.token_ids) == len(spoken.mask) == len(spoken.log_probs) <= TOKENS
        assert spoken.mask[-1] == 1 and 1 <= spoken.turns <= ROUNDS
        assert all((value == -1.0) == bool(real) for value, real in zip(spoken.log_probs, spoken.mask, strict=True))
        assert (
            0 <= spoken.failed_calls <= spoken.calls
            and [who for who, _ in spoken.transcript].count("assistant") == spoken.turns
        )

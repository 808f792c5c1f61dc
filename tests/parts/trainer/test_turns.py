"""Several turns with real tokenizers, verl's parser and builder, and tools in the real pool; the engine is a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from appliance.files import digest_of
from appliance.quant.mismatch import TopWords
from appliance.quant.support import Support
from appliance.tasks.tiny_model import byte_tokenizer
from appliance.tasks.tools import MOST_CHARACTERS
from appliance.trainer.rewards import RewardPool
from appliance.trainer.turns import Opening, Tally, Trajectory, TrajectoryGroup, Turns, in_pool, turn_seed

TOKENIZER = byte_tokenizer(max_positions=2048, calls_tools=True)
SCHEMAS = [{"type": "function", "function": {"name": "multiply", "parameters": {}}}]
ASKED = [{"role": "user", "content": "37*58"}]
TOOLS = """
import os, sys, time
def multiply(a: int, b: int) -> int:
    return a * b
def hang() -> str:
    time.sleep(60)
def die() -> str:
    os._exit(3)
def leave() -> str:
    sys.exit()
def raises() -> str:
    raise ValueError("no such number")
def talks() -> str:
    return "x" * 100_000
def nothing() -> None:
    print("said to nobody")
def circle() -> list:
    it = []
    it.append(it)
    return it
def strange() -> str:
    return chr(0xD800)
"""


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Engine:
    """Says its lines: of each call one for each prompt, or for each sample of the first. Log-probs count its tokens."""

    def __init__(self, *rounds: Sequence[str]) -> None:
        self._rounds = list(rounds)
        self.requests: list[dict[str, Any]] = []

    async def __call__(
        self,
        prompts: list[list[int]],
        *,
        seeds: list[int | None],
        num_samples: int,
        already: list[int] | None = None,
    ) -> AsyncIterator[tuple[int, Any]]:
        self.requests.append({"prompts": prompts, "seeds": seeds, "num_samples": num_samples, "already": already})
        lines = self._rounds.pop(0)
        assert len(lines) == len(prompts) * num_samples
        for place in reversed(range(len(prompts))):  # as they are ready, in any order
            said = lines[place * num_samples : (place + 1) * num_samples]
            yield place, SimpleNamespace(samples=[drawn(text) for text in said], weights_version=7)


def drawn(text: str) -> Any:
    """A turn that is cut ends with ... The one most likely word at each token is that token."""
    cut = text.endswith("...")
    ids = TOKENIZER(text.removesuffix("...") + ("" if cut else "<|im_end|>"))["input_ids"]
    log_probs = [-1.0 - place for place in range(len(ids))]
    top = TopWords(np.array(ids, np.int32)[:, None], np.array(log_probs, np.float32)[:, None])
    support = Support(np.array(ids, np.int32), np.ones(len(ids), np.int32))
    return SimpleNamespace(token_ids=ids, log_probs=log_probs, finished=not cut, top=top, support=support)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("code") / "tools.py"
    path.write_text(TOOLS)
    return str(path)


def play(
    engine: Engine, *, file: str, seed: int | None = 5, max_turns: int = 2, max_tokens: int = 512
) -> dict[int, TrajectoryGroup]:
    """One prompt, as many samples as the engine has lines at first."""

    async def played() -> dict[int, TrajectoryGroup]:
        pool = RewardPool(load=tuple, workers=1)
        turns = Turns(
            TOKENIZER,
            model_type="qwen2",
            schemas=SCHEMAS,
            max_turns=max_turns,
            max_tokens=max_tokens,
            call=in_pool(pool, file=file, sha256=digest_of(Path(file)), timeout_s=2.0),
        )
        opening = Opening(ASKED, turns.prompt_ids(ASKED), seed)
        num_samples = len(engine._rounds[0])
        try:
            return {p: group async for p, group in turns.play([opening], ask=engine, num_samples=num_samples)}
        finally:
            pool.close()

    return asyncio.run(played())


def play_one(engine: Engine, **others: Any) -> Trajectory:
    return play(engine, **others)[0].samples[0]


def test_a_call_is_answered_and_the_model_goes_on(file: str) -> None:
    engine = Engine([call("multiply", a=37, b=58), "37"], ["2146"])
    groups = play(engine, file=file)
    right, wrong = groups[0].samples
    whole = f"{call('multiply', a=37, b=58)}<|im_end|>\n<tool_response>2146</tool_response>=2146<|im_end|>"
    assert TOKENIZER.decode(right.token_ids) == whole
    assert right.transcript == [
        ("assistant", call("multiply", a=37, b=58)),
        ("tool", "2146"),
        ("assistant", "2146"),
    ]
    assert (right.text, right.turns, right.calls, right.failed_calls, right.finished) == ("2146", 2, 1, 0, True)
    top = right.top.spread(right.mask)
    assert top.ids_TK[:, 0].tolist() == [id * real for id, real in zip(right.token_ids, right.mask, strict=True)]
    assert top.log_probs_TK[:, 0].tolist() == right.log_probs and 0 in right.mask
    support = right.support.spread(right.mask)
    assert support.size_T.tolist() == right.mask  # one word each, of tools' tokens none
    assert support.ids_F.tolist() == [id for id, real in zip(right.token_ids, right.mask, strict=True) if real]
    assert (wrong.text, wrong.turns, wrong.calls, wrong.transcript) == ("37", 1, 0, [("assistant", "37")])
    assert groups[0].weights_version == 7
    tally = Tally()
    assert tally.metrics(has_tools=False) == tally.metrics(has_tools=True) == {}
    tally.extend(groups[0].samples)
    tool_tokens = len(TOKENIZER("\n<tool_response>2146</tool_response>=")["input_ids"])
    tally.extend([Trajectory([3], [-1.0], [1], finished=False, text="")])
    assert tally.metrics(has_tools=False) == {"unfinished_fraction": 1 / 3}
    assert tally.metrics(has_tools=True) == {
        "unfinished_fraction": 1 / 3,
        "turns_mean": 4 / 3,
        "tool_calls_mean": 1 / 3,
        "tool_calls_failed_fraction": 0.0,
        "tool_tokens_mean": tool_tokens / 3,
    }


def test_the_engine_gets_its_own_tokens_again_and_what_is_left(file: str) -> None:
    engine = Engine(["37", call("multiply", a=37, b=58)], ["2146"])
    (sample,) = play(engine, file=file)[0].samples[1:]
    prompt = TOKENIZER("multiply:37*58=")["input_ids"]
    first, second = engine.requests
    assert (first["prompts"], first["seeds"], first["num_samples"], first["already"]) == ([prompt], [5], 2, None)
    before = sample.token_ids[: -len("2146") - 1]
    assert second["prompts"] == [prompt + before] and second["already"] == [len(before)]
    assert (second["seeds"], second["num_samples"]) == ([turn_seed(6, turn=2)], 1)  # vLLM gave the second sample 5 + 1


def test_only_what_the_model_said_has_a_mask_and_a_log_prob(file: str) -> None:
    sample = play_one(Engine([call("multiply", a=37, b=58)], ["2146"]), file=file)
    between = TOKENIZER("\n<tool_response>2146</tool_response>=")["input_ids"]
    first = len(sample.token_ids) - len(between) - len("2146") - 1
    assert sample.mask == [1] * first + [0] * len(between) + [1] * 5
    counted = [-1.0 - place for place in range(first)]
    assert sample.log_probs == counted + [0.0] * len(between) + [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert sample.generated == first + 5


def test_the_tokens_are_what_the_template_renders(file: str) -> None:
    sample = play_one(Engine([call("multiply", a=37, b=58)], ["2146"]), file=file)
    tool_call = {"function": {"name": "multiply", "arguments": {"a": 37, "b": 58}}}
    messages = [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [tool_call]},
        {"role": "tool", "content": "2146"},
        {"role": "assistant", "content": "2146"},
    ]
    rendered = TOKENIZER.apply_chat_template(messages, tools=SCHEMAS, return_dict=False)
    newline = TOKENIZER("\n")["input_ids"]
    assert TOKENIZER("multiply:37*58=")["input_ids"] + sample.token_ids + newline == rendered


def test_greedy_has_no_seed_in_any_turn(file: str) -> None:
    engine = Engine([call("multiply", a=1, b=2)], ["2"])
    play(engine, file=file, seed=None)
    assert [asked["seeds"] for asked in engine.requests] == [[None], [None]]


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (call("raises"), "error: ValueError: no such number"),
        (call("hang"), "error: `hang`: no answer after 2 s"),
        (call("die"), "error: `die`: the process of the function ended with 3"),
        (call("circle"), "error: ValueError: Circular reference detected"),
        (call("divide", a=1), "error: there is no tool `divide`, only multiply, hang, die, leave, "),
        (call("multiply", a=1), "error: `multiply`: missing a required argument: 'b'"),
        (call("multiply", a=1, c=2), "error: `multiply`: missing a required argument: 'b'"),
        (call("multiply", a="x", b=2), "error: `multiply`: a: Input should be a valid integer"),
        ("<tool_call>{multiply 3 4}</tool_call>", "error: a tool call is not JSON with `name` and `arguments`"),
        ("<tool_call>[1]</tool_call>", "error: a tool call is not JSON with `name` and `arguments`"),
        ('<tool_call>{"name": "multiply", "arg', "error: a tool call is not JSON with `name` and `arguments`"),
        ('<tool_call>{"name": "multiply", "arguments": 3}</tool_call>', "error: the arguments of `multiply` are not"),
    ],
)
def test_what_goes_wrong_is_a_message_to_the_model(asked: str, answer: str, file: str) -> None:
    sample = play_one(Engine([asked], ["I see"]), file=file)
    who, told = sample.transcript[1]
    assert who == "tool" and told.startswith(answer)
    assert (sample.calls, sample.failed_calls, sample.text) == (1, 1, "I see")


@pytest.mark.parametrize(
    ("asked", "answer"), [(call("nothing"), "null"), (call("strange"), "?"), (call("multiply", a="3", b=4), "12")]
)
def test_what_a_tool_returns_is_text(asked: str, answer: str, file: str) -> None:
    sample = play_one(Engine([asked], ["I see"]), file=file)
    assert sample.transcript[1] == ("tool", answer) and sample.failed_calls == 0


def test_a_tool_that_leaves_its_process_is_a_message(file: str) -> None:
    sample = play_one(Engine([call("leave")], ["I see"]), file=file)
    assert (sample.transcript[1], sample.failed_calls) == (("tool", "error: SystemExit: "), 1)


def test_what_is_too_much_is_cut(file: str) -> None:
    sample = play_one(Engine([call("talks")], ["I see"]), file=file, max_tokens=6000)
    assert sample.transcript[1] == (
        "tool",
        "x" * MOST_CHARACTERS + f" ... ({100_000 - MOST_CHARACTERS} more characters)",
    )


def test_several_calls_of_a_turn_are_answered_in_their_order(file: str) -> None:
    asked = call("multiply", a=2, b=3) + call("raises") + call("multiply", a=4, b=5)
    sample = play_one(Engine([asked], ["done"]), file=file)
    assert [text for who, text in sample.transcript if who == "tool"] == [
        "6",
        "error: ValueError: no such number",
        "20",
    ]
    assert (sample.turns, sample.calls, sample.failed_calls) == (2, 3, 1)


def test_only_so_many_calls_of_a_turn_are_made(file: str) -> None:
    sample = play_one(Engine([call("multiply", a=2, b=3) * 18], ["done"]), file=file, max_tokens=2048)
    told = [text for who, text in sample.transcript if who == "tool"]
    assert told == ["6"] * 16 + ["error: only 16 calls of a turn are made"] * 2
    assert (sample.turns, sample.calls, sample.failed_calls) == (2, 18, 2)


def test_no_more_turns_than_allowed(file: str) -> None:
    again = call("multiply", a=2, b=3)
    engine = Engine([again], [again], [again])
    sample = play_one(engine, file=file, max_turns=3)
    assert (sample.turns, sample.calls, sample.text, len(engine.requests)) == (3, 2, again, 3)


def test_a_turn_that_is_cut_is_the_last(file: str) -> None:
    sample = play_one(Engine([call("multiply", a=2, b=3) + "..."]), file=file)
    assert (sample.turns, sample.calls, sample.finished) == (1, 0, False)


def test_an_answer_that_does_not_fit_is_left_out(file: str) -> None:
    call_text = call("multiply", a=37, b=58)
    room = len(drawn(call_text).token_ids) + len(TOKENIZER("\n<tool_response>2146</tool_response>=")["input_ids"])
    sample = play_one(Engine([call_text]), file=file, max_tokens=room)
    assert (sample.turns, sample.calls, sample.finished) == (1, 1, False)
    assert sample.mask == [1] * len(sample.token_ids)
    assert play_one(Engine([call_text], ["..."]), file=file, max_tokens=room + 1).turns == 2


@pytest.mark.parametrize("fails", ["raise_exception('only single tool-calls')", "message.content.name.first", "1 + ''"])
def test_what_the_chat_template_refuses_ends_the_sample(fails: str, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = f"{{% if messages[-1].role == 'tool' %}}{{{{ {fails} }}}}{{% endif %}}"
    monkeypatch.setattr(TOKENIZER, "chat_template", refuses + TOKENIZER.chat_template)
    call_text = call("multiply", a=37, b=58)
    groups = play(Engine([call_text, "37"]), file=file)
    refused, other = groups[0].samples
    assert (refused.turns, refused.finished, refused.transcript) == (1, False, [("assistant", call_text)])
    assert (other.turns, other.finished) == (1, True)


def test_a_file_that_is_gone_is_a_message(tmp_path: Path) -> None:
    sample = play_one(Engine([call("multiply", a=2, b=3)], ["6"]), file=str(tmp_path / "gone.py"))
    assert sample.failed_calls == 1 and sample.transcript[1][1].startswith("error: FileNotFoundError")

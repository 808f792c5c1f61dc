"""Several turns: the model speaks, the tools that it calls answer, and it speaks again.

In rounds, for the last bits of a log-probability depend on what is computed together (engine/replica.py): the samples
of all prompts speak, the tools that they call answer in the pool's processes, and then all samples that are not over
speak in one call, each with its own seed. A sample stays with the engine that began it, which still has its tokens.
Tools and rewards do not wait for the round: a call is answered, and a prompt given, as soon as its samples have spoken.

The engine gets token ids only, those that it made and those that verl's continuous-token builder gives for the tools'
messages. Those of tools and templates have mask 0 and log-prob 0: nothing is learned from them and nothing counts them,
but that task.max_response_tokens bounds all that comes after the prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jinja2 import TemplateError
from verl.experimental.agent_loop import tool_parser
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from appliance.quant.mismatch import TopWords
from appliance.quant.support import Support
from appliance.tasks.response_text import ResponseReader
from appliance.tasks.rows import Message
from appliance.tasks.tools import Schema, ToolAnswer, call_tool, failure
from appliance.trainer.rewards import CallFailed, RewardPool

FORMAT = "hermes"  # of calls: <tool_call>{"name": ..., "arguments": {...}}</tool_call>
BEGINS = "<tool_call>"
MOST_CALLS = 16  # that are made of a turn, one after the other

tool_parser.logger.setLevel(logging.CRITICAL)  # a call that cannot be read is the model's to hear of, and is counted


class Drawn(Protocol):
    """One response of an engine: `EngineSample` of engine/replica.py."""

    token_ids: list[int]
    log_probs: list[float]
    finished: bool
    top: TopWords | None
    support: Support | None


@dataclass
class Trajectory:
    """A sample: all that came after its prompt."""

    token_ids: list[int]
    log_probs: list[float]
    mask: list[int]
    """Mask: 1 for tokens that the model generated, else 0."""
    finished: bool
    text: str
    """Text of its last turn, after what the prompt had begun of it."""
    transcript: list[Message] = field(default_factory=list)
    """Turns of the model and answers of the tools, in their order."""
    turns: int = 1
    calls: int = 0
    failed_calls: int = 0
    top: TopWords | None = None
    """The most likely words at each token of the model's own; None where engines did not report them."""
    support: Support | None = None
    """The words that each token of the model's own was drawn from; None where engines did not report them."""

    @property
    def generated(self) -> int:
        """Tokens of the model's own."""
        return sum(self.mask)

    @property
    def last_turn(self) -> list[int]:
        """Tokens of the model's last turn."""
        begins = len(self.mask) - self.mask[::-1].index(0) if 0 in self.mask else 0
        return self.token_ids[begins:]


@dataclass(frozen=True)
class TrajectoryGroup:
    """The samples of one prompt, and the number of the weight update they were made with."""

    samples: list[Trajectory]
    weights_version: int


@dataclass
class Tally:
    """Counts of what the samples of a step did, for its line."""

    samples: int = 0
    unfinished: int = 0
    turns: int = 0
    calls: int = 0
    failed_calls: int = 0
    tool_tokens: int = 0

    def extend(self, samples: Sequence[Trajectory]) -> None:
        self.samples += len(samples)
        self.unfinished += sum(not each.finished for each in samples)
        self.turns += sum(each.turns for each in samples)
        self.calls += sum(each.calls for each in samples)
        self.failed_calls += sum(each.failed_calls for each in samples)
        self.tool_tokens += sum(len(each.mask) - each.generated for each in samples)

    def metrics(self, *, has_tools: bool) -> dict[str, float]:
        if not (num_samples := self.samples):
            return {}
        unfinished = {"unfinished_fraction": self.unfinished / num_samples}
        if not has_tools:
            return unfinished
        return unfinished | {
            "turns_mean": self.turns / num_samples,
            "tool_calls_mean": self.calls / num_samples,
            "tool_calls_failed_fraction": self.failed_calls / max(1, self.calls),
            "tool_tokens_mean": self.tool_tokens / num_samples,
        }


GenerateGroups = Callable[..., AsyncIterator[tuple[int, Any]]]
"""(prompts, *, seeds, num_samples, already): as `generate_groups` of engine/replica.py, of one engine."""


@dataclass(frozen=True)
class Opening:
    """Beginning of a conversation."""

    messages: list[dict[str, Any]]
    token_ids: list[int]
    seed: int | None
    """Seed of the first sample, None where nothing is drawn."""


@dataclass
class _Conversation:
    opening: Opening
    session: int
    messages: list[dict[str, Any]]
    trajectory: Trajectory
    content: str = ""
    """Text of the newest turn without its calls."""
    calls: list[Any] = field(default_factory=list)
    """Calls of the newest turn."""
    unread: int = 0
    """Calls of the newest turn that cannot be read."""
    has_ended: bool = False

    def seed(self, turn: int) -> int | None:
        return None if self.opening.seed is None else turn_seed(self.opening.seed + self.session, turn=turn)


def turn_seed(seed: int, *, turn: int) -> int:
    """Return the seed of a sample's later turn: 0 <= seed < 2^62. seed: of its first."""
    return int.from_bytes(hashlib.sha256(f"{seed} turn {turn}".encode()).digest()[:8]) >> 2


class Turns:
    """Turns of the model with its tools, which make one response."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        model_type: str,
        schemas: list[Schema],
        max_turns: int,
        max_tokens: int,
        call: Callable[[str, str], Awaitable[ToolAnswer]],
        clock: Mapping[str, Callable[[str], str]] | None = None,
    ) -> None:
        """tokenizer, model_type: of the model.  schemas: of the tools.  max_tokens: of all that comes after a prompt.
        call: gives the answer to a call of a tool by its name and its arguments as JSON.  clock: as of Rollouts."""
        self._tokenizer = tokenizer
        self._reader = ResponseReader(tokenizer)
        self._builder = create_continuous_token_builder(
            tokenizer, hf_model_type=model_type, chat_template_kwargs=dict(clock or {})
        )
        self._parser = tool_parser.ToolParser.get_tool_parser(FORMAT, tokenizer)
        self._schemas = schemas
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._call = call

    def prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        return list(self._builder.build_initial_tokens(messages, tools=self._schemas))

    async def play(
        self, openings: Sequence[Opening], *, ask: GenerateGroups, num_samples: int
    ) -> AsyncIterator[tuple[int, TrajectoryGroup]]:
        """Yield the place of each opening and its samples, as soon as the last of them has ended."""
        begun: dict[int, list[_Conversation]] = {}
        versions: dict[int, int] = {}

        def ended(places: Iterable[int]) -> list[tuple[int, TrajectoryGroup]]:
            over = [place for place in places if all(each.has_ended for each in begun[place])]
            return [
                (place, TrajectoryGroup([each.trajectory for each in begun.pop(place)], versions[place]))
                for place in over
            ]

        async def opened() -> AsyncIterator[tuple[int, list[_Conversation]]]:
            ids, seeds = [each.token_ids for each in openings], [each.seed for each in openings]
            async for place, group in ask(ids, seeds=seeds, num_samples=num_samples):
                versions[place] = group.weights_version
                begun[place] = [
                    _Conversation(openings[place], session, list(openings[place].messages), one_turn(drawn))
                    for session, drawn in enumerate(group.samples)
                ]
                yield place, begun[place]

        async def gone_on(turn: int) -> AsyncIterator[tuple[int, list[_Conversation]]]:
            going = [(place, each) for place in sorted(begun) for each in begun[place] if not each.has_ended]
            answers = ask(
                [each.opening.token_ids + each.trajectory.token_ids for _, each in going],
                seeds=[each.seed(turn) for _, each in going],
                num_samples=1,
                already=[len(each.trajectory.token_ids) for _, each in going],
            )
            async for number, group in answers:
                place, each = going[number]
                _add(each.trajectory, group.samples[0])
                yield place, [each]

        for turn in range(1, self._max_turns + 1):
            answering: list[asyncio.Task[None]] = []
            try:
                async for place, those in opened() if turn == 1 else gone_on(turn):
                    for each in those:
                        await self._read(each)
                        each.has_ended |= turn == self._max_turns
                    answering += [asyncio.create_task(self._answer(each)) for each in those if not each.has_ended]
                    for group in ended([place]):
                        yield group
                await asyncio.gather(*answering)
            finally:
                for task in answering:
                    task.cancel()
            for group in ended([*begun]):  # an answer had no room
                yield group
            if not begun:
                return

    async def _read(self, conversation: _Conversation) -> None:
        """Read a turn of the model: what it says, and whether the conversation ends there, for it calls no tool or
        was cut."""
        trajectory, ids = conversation.trajectory, conversation.trajectory.last_turn
        trajectory.text = self._reader.text(ids, finished=trajectory.finished)
        trajectory.transcript.append(("assistant", trajectory.text))
        conversation.content, conversation.calls = await self._parser.extract_tool_calls(ids, self._schemas)
        conversation.unread = max(0, self._tokenizer.decode(ids).count(BEGINS) - len(conversation.calls))
        conversation.has_ended = not trajectory.finished or not (conversation.calls or conversation.unread)

    async def _answer(self, conversation: _Conversation) -> None:
        """Have the tools answer that a turn called. The conversation ends where its token budget has no room for the
        answers."""
        trajectory, calls = conversation.trajectory, conversation.calls
        answers = [(each.name, await self._call(each.name, each.arguments)) for each in calls[:MOST_CALLS]]
        answers += [(each.name, failure(f"only {MOST_CALLS} calls of a turn are made")) for each in calls[MOST_CALLS:]]
        answers += [("", failure("a tool call is not JSON with `name` and `arguments`"))] * conversation.unread
        trajectory.calls += len(answers)
        trajectory.failed_calls += sum(answer.failed for _, answer in answers)
        turn = [_assistant(conversation.content, calls), *(_tool(name, answer) for name, answer in answers)]
        before = [*conversation.messages, turn[0]]
        prompt = conversation.opening.token_ids
        try:
            merged = self._builder.merge_context_tokens(
                before, [*before, *turn[1:]], prompt + trajectory.token_ids, tools=self._schemas
            )
        except (TemplateError, TypeError, ValueError):  # what a chat template refuses, or cannot do with
            merged = None
        if merged is None or len(merged.token_ids) - len(prompt) >= self._max_tokens:
            trajectory.finished, conversation.has_ended = False, True
            return
        mask, log_probs = self._builder.align_response_metadata(merged, trajectory.mask, trajectory.log_probs)
        conversation.messages += turn
        trajectory.transcript += [("tool", answer.text) for _, answer in answers]
        trajectory.token_ids, trajectory.mask, trajectory.log_probs = merged.token_ids[len(prompt) :], mask, log_probs
        if trajectory.top is not None:  # the builder may have cut the last tokens
            trajectory.top = trajectory.top.first(trajectory.generated)
        if trajectory.support is not None:
            trajectory.support = trajectory.support.first(trajectory.generated)


def in_pool(
    pool: RewardPool, *, file: str, sha256: str, timeout_s: float, beside: str = ""
) -> Callable[[str, str], Awaitable[ToolAnswer]]:
    """Return a function that calls the tools of a file, as it was planned. However a call goes wrong, the model hears
    of it.

    sha256, beside: as of load_module.
    """

    async def call(name: str, arguments: str) -> ToolAnswer:
        try:
            return await pool.call(call_tool, file, sha256, name, arguments, beside, timeout_s=timeout_s)
        except CallFailed as failed:
            return failure(f"`{name}`: {failed.why}")

    return call


def _assistant(content: str, calls: list[Any]) -> dict[str, Any]:
    made = [{"name": each.name, "arguments": json.loads(each.arguments)} for each in calls]
    asked = {"tool_calls": [{"type": "function", "function": each} for each in made]} if made else {}
    return {"role": "assistant", "content": content, **asked}


def _tool(name: str, answer: ToolAnswer) -> dict[str, Any]:
    return {"role": "tool", "name": name, "content": answer.text}


def one_turn(drawn: Drawn, *, text: str = "") -> Trajectory:
    """Make a sample of a run without tools, or the first of several turns, whose text comes later."""
    mask = [1] * len(drawn.token_ids)
    words = {"top": drawn.top, "support": drawn.support}
    return Trajectory(drawn.token_ids, drawn.log_probs, mask, drawn.finished, text, **words)


def _add(trajectory: Trajectory, drawn: Drawn) -> None:
    trajectory.token_ids = trajectory.token_ids + drawn.token_ids
    trajectory.log_probs = trajectory.log_probs + drawn.log_probs
    trajectory.mask = trajectory.mask + [1] * len(drawn.token_ids)
    if trajectory.top is not None and drawn.top is not None:
        trajectory.top = trajectory.top.followed_by(drawn.top)
    if trajectory.support is not None and drawn.support is not None:
        trajectory.support = trajectory.support.followed_by(drawn.support)
    trajectory.finished = drawn.finished
    trajectory.turns += 1

"""Which engine generates which prompts of a step, and the calls that bring prompts there and samples back."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from appliance.errors import EngineError, last_line
from appliance.record.liveness import Heartbeat
from appliance.terms.counts import counted

HINT = "the log has the details"


@dataclass(frozen=True)
class Sampling:
    """Settings by which one kind of rollout is sampled. temperature 0 is greedy."""

    temperature: float
    top_p: float
    num_samples: int
    top_k: int = -1
    """Number of the most likely words that are drawn from; -1: all."""
    top_log_probs: int = 0
    """Number of the most likely words at each token whose log-probs are requested."""


@dataclass(frozen=True)
class Prompt:
    """A row of the data set on its way to an engine."""

    row: dict[str, Any]
    token_ids: list[int]
    seed: int | None
    """Seed of the prompt's first sample; None where nothing is drawn."""
    group: asyncio.Future[Any]
    """Samples of the prompt, once the engine has answered."""


class EngineShares:
    """The rollout engines of a run, and how many prompts each of them has not answered yet.

    Everything but `serve_by` and `abort` is called on the loop of the rollouts.
    """

    def __init__(self, servers: list[ActorHandle]) -> None:
        """servers: one handle per rollout replica."""
        self._heartbeat = Heartbeat()
        self.serve_by(servers)

    def serve_by(self, servers: list[ActorHandle]) -> None:
        """Use these engines from now on. To be called while nothing is generated."""
        self._servers = servers
        self._unanswered = [0] * len(servers)

    def assign(self, prompts: Sequence[Prompt]) -> list[list[Prompt]]:
        """Give each prompt to the engine with the fewest unanswered ones, and return each engine's share.

        Dynamic sampling asks for a few prompts at a time: they go to the engines that have finished theirs.
        """
        unanswered, shares = self._unanswered, [list[Prompt]() for _ in self._servers]

        def count_answer(number: int, _: object) -> None:
            unanswered[number] -= 1

        for prompt in prompts:
            number = min(range(len(shares)), key=unanswered.__getitem__)
            unanswered[number] += 1
            prompt.group.add_done_callback(functools.partial(count_answer, number))
            shares[number].append(prompt)
        return shares

    async def ask(
        self,
        number: int,
        prompts: list[list[int]],
        *,
        seeds: list[int | None],
        num_samples: int,
        sampling: Sampling,
        already: list[int] | None = None,
    ) -> AsyncIterator[tuple[int, Any]]:
        """Yield the answers of an engine's `generate_groups`: a place in `prompts`, and its samples.

        Raises EngineError when the engine fails, or leaves prompts out.
        """
        answers = (
            self._servers[number]
            .generate_groups.options(num_returns="streaming")
            .remote(
                prompts,
                seeds=seeds,
                sampling={
                    "temperature": sampling.temperature,
                    "top_p": sampling.top_p,
                    "top_k": sampling.top_k,
                    "logprobs": sampling.top_log_probs,
                },
                num_samples=num_samples,
                already=already,
            )
        )
        num_answers = 0
        try:
            async for answer in answers:
                yield await answer
                num_answers += 1
                self._heartbeat.beat()
        except RayError as error:
            raise _engine_error(error, engine=number) from error
        if num_answers < len(prompts):
            raise EngineError(
                f"rollout engine {number} answered {num_answers} of {counted(len(prompts), 'prompt')}", hint=HINT
            )

    async def clear_caches(self) -> None:
        """Have every engine forget the prompts that it has cached."""
        await asyncio.gather(*(server.clear_kv_cache.remote() for server in self._servers))

    def abort(self) -> None:
        """Have every engine leave what it is generating. Does not wait for that."""
        for server in self._servers:
            server.abort_all_requests.remote()


def _engine_error(error: RayError, *, engine: int) -> EngineError:
    """Describe what happened to an engine, in the words of the watch in engines.py: either of the two may report it."""
    if isinstance(error, RayActorError):
        problem = "died: its server's process is gone"
    elif "EngineDeadError" in type(error).__name__:  # Ray names the cause so
        problem = "died: its core process is gone"
    else:
        problem = f"failed: {type(error).__name__}: {last_line(error)}"
    return EngineError(f"rollout engine {engine} {problem}", hint=HINT)

"""What an engine's core does with what its ranks say of their weights: closed by name, and then for good."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from appliance.errors import SyncError
from flashrl_compat import core as module
from flashrl_compat.worker import WORKER_CLASS

SOUND, NEWER = (1, "whole", ""), (2, "whole", "")
OPEN, BROKEN = (1, "open", "load_weights"), (1, "broken", "model.norm did not come")
DROPPED = (1, "dropped", "a sleep of level 2, which dropped them")


class Core(SimpleNamespace):
    """As much of vLLM's as `flashrl_compat.core` touches, over workers whose answers are given: an error is raised."""

    def __init__(self, *answers: object, paused: bool = False, **more: object) -> None:
        waiting = deque(answers)

        def ask(method: str, args: tuple) -> object:
            answer = waiting.popleft()
            if isinstance(answer, Exception):
                raise answer
            return answer

        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(worker_cls=WORKER_CLASS))
        self.scheduler = SimpleNamespace(connector=None)
        executor = SimpleNamespace(collective_rpc=ask)
        super().__init__(model_executor=executor, waiting=waiting, paused=paused, ended=[], taken=[], **more)
        module._known(self).version = 1

    def is_scheduler_paused(self) -> bool:
        return self.paused

    def pause_scheduler(self, mode: str, clear_cache: bool) -> None:
        self.paused = True
        self.ended.append(mode)


def follow(core: Core) -> str:
    """Why it is closed."""
    assert not module._follow(core, settles=False)
    return module._known(core).closed


def add(core: Core, name: str = "r1") -> None:
    original: Callable[..., None] = lambda self, request, wave: self.taken.append(request.request_id)  # noqa: E731
    module._refuses_requests(original)(core, SimpleNamespace(request_id=name, client_index=3))


@pytest.mark.parametrize("answer", [RuntimeError("model.norm came twice"), [SOUND, None]])
def test_a_rank_that_cannot_say_closes_the_core_for_good_and_is_not_asked_again(answer: object) -> None:
    """None: what the call before left, in which rank 0 raised. The next answer would be one too late as well."""
    core = Core(answer, [SOUND, SOUND])
    with pytest.raises(SyncError):
        module._follow(core, settles=False)
    assert core.ended == ["abort"]
    assert follow(core).startswith("a worker's weights cannot be known: ")
    assert len(core.waiting) == 1


def test_what_the_call_before_raised_is_the_reason() -> None:
    core = Core([SOUND, None])
    with pytest.raises(SyncError):
        module._follow(core, settles=False, after=RuntimeError("model.norm came twice"))
    assert follow(core) == "a worker's weights cannot be known: model.norm came twice"


@pytest.mark.parametrize(
    ("ranks", "why", "hint"),
    [
        ([SOUND, OPEN], "a weight update is open on rank 1, begun by load_weights", module.OPEN),
        ([NEWER, OPEN], "a weight update is open on rank 1, begun by load_weights", module.OPEN),
        ([OPEN, BROKEN], "a weight update is open on rank 0, begun by load_weights", module.FINAL),
        ([DROPPED, SOUND], "rank 0 has had no weights since a sleep of level 2, which dropped them", module.WANTED),
        ([SOUND, (1, "mended", "")], "a worker's weights cannot be known: 'mended' is not a valid WeightState", ""),
    ],
)
def test_a_rank_whose_weights_are_not_whole_closes_the_core(ranks: list[tuple], why: str, hint: str) -> None:
    """For good only where they are broken, or where nobody knows."""
    core = Core(ranks)
    with nullcontext() if hint else pytest.raises(SyncError):
        follow(core)
    assert module._known(core).closed == why
    assert module._known(core).hint == (hint or module.FINAL)


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ([SOUND, BROKEN], "the weights of rank 1 are half-updated: model.norm did not come"),
        ([SOUND, NEWER], "ranks have taken different numbers of weight updates: [1, 2]"),
    ],
)
def test_one_rank_that_is_broken_or_ahead_closes_the_core_for_good(ranks: list[tuple], why: str) -> None:
    core = Core(ranks, [NEWER, NEWER])
    assert follow(core) == why == follow(core)
    assert core.ended == ["abort"]


def test_an_open_update_on_one_rank_ends_what_is_in_flight_and_breaking_ends_what_came_since() -> None:
    core = Core([SOUND, OPEN], [SOUND, BROKEN])
    assert follow(core) == "a weight update is open on rank 1, begun by load_weights"
    assert core.ended == ["abort"]
    assert "half-updated" in follow(core)
    assert core.ended == ["abort", "abort"]


def test_a_request_on_its_way_when_an_update_broke_is_answered_with_why() -> None:
    """In a core of its own process, which has nobody to raise an error for."""
    core = Core([SOUND, BROKEN], output_queue=queue.SimpleQueue())
    follow(core)
    add(core)
    client, outputs = core.output_queue.get_nowait()
    [answer] = outputs.outputs
    why = "request r1: the weights of rank 1 are half-updated: model.norm did not come"
    assert (client, outputs.finished_requests, core.taken) == (3, {"r1"}, [])
    assert answer.stop_reason == f"{why}; {module.FINAL}"


def test_a_request_in_a_users_own_pause_waits_for_an_open_update_and_not_for_a_broken_one() -> None:
    core = Core([OPEN], [BROKEN], paused=True, output_queue=queue.SimpleQueue())
    follow(core)
    add(core, "early")
    assert (core.taken, core.output_queue.empty()) == (["early"], True)
    follow(core)
    add(core, "late")
    assert core.taken == ["early"]
    assert core.output_queue.get_nowait()[1].finished_requests == {"late"}

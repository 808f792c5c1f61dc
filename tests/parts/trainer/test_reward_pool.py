"""The reward pool with real processes: what goes wrong with one response is counted, and the next one is graded."""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from pebble import ProcessPool
from pebble.pool.base_pool import PoolStatus
from pebble.pool.process import PoolManager

from appliance.processes import find_processes
from appliance.record.liveness import Heartbeat, last_beat
from appliance.tasks.grading import Fault, Graded
from appliance.tasks.library import TASKS
from appliance.tasks.task import Response, RewardFunction
from appliance.terms.environment import LOG_DIR_VARIABLE
from appliance.trainer import rewards
from appliance.trainer.rewards import CallFailed, RewardPool, num_workers

HANG_S = 1.0  # the pool's time limit here; a hang is ended after it
ENDS_WITHIN_S = 300.0  # whatever a test waits for


def misbehaving() -> tuple[RewardFunction, ...]:
    return (RewardFunction("it", 1.0, lambda response: misbehave(response.text, response.truth)),)


def misbehave(response: str, truth: str) -> float:
    """What the response says."""
    match response:
        case "raise":
            raise ValueError("no such thing\nas this")
        case "hang":
            time.sleep(600)
        case "hang deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                pass
        case "die":
            os._exit(3)
        case "end":
            os._exit(0)
        case "leave":
            sys.exit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "cancel":
            raise asyncio.CancelledError
        case "unprintable":
            raise Unprintable
        case "unprintable base":
            raise UnprintableBase
        case "read":
            return float(input())
        case "fork":
            return float(os.fork() == 0)  # the child's answer would be 1, and come as well
        case "fork lives":
            if os.fork() == 0:
                time.sleep(600)
        case "nan":
            return float("nan")
        case "text":
            return "1"  # type: ignore[return-value]
        case _ if response.startswith("start "):
            subprocess.Popen(["sleep", "600"])
            return misbehave(response.removeprefix("start "), truth)
        case _ if response.startswith("/"):
            Path(response).write_text(str(os.getpid()))
            time.sleep({"slow": HANG_S / 2, "hang": 600}.get(Path(response).name[:4], 0))
    return float(response == truth)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no")

    def __reduce__(self) -> tuple[object, ...]:
        return (os._exit, (7,))  # of the process that reads it


class UnprintableBase(BaseException):
    def __str__(self) -> str:
        raise KeyboardInterrupt

    __reduce__ = Unprintable.__reduce__


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    made = RewardPool(load=misbehaving, workers=2, timeout_s=HANG_S)
    yield made
    made.close()


def grade(pool: RewardPool, *responses: str, truth: str = "7") -> list[Graded]:
    async def all_of_them() -> list[Graded]:
        return list(await asyncio.gather(*(pool.grade(Response(each, truth)) for each in responses)))

    return asyncio.run(asyncio.wait_for(all_of_them(), timeout=ENDS_WITHIN_S))


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + ENDS_WITHIN_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Of the processes that live, of those that began in this test."""
    monkeypatch.setenv("OF_THE_TEST", mark := str(time.monotonic_ns()))
    return lambda: [each.name for each in find_processes(f"OF_THE_TEST={mark}") if not each.tracker]


GONE = Graded(0.0, Fault.DIED, "the processes of the pool are gone")
NOT = "the reward `it` returned {}, not a finite number"


@pytest.mark.parametrize(
    ("response", "fault", "why"),
    [
        ("raise", Fault.RAISED, "ValueError: no such thing"),
        ("hang", Fault.TIMED_OUT, "no answer after 1 s"),
        ("hang deaf", Fault.TIMED_OUT, "no answer after 1 s"),
        ("die", Fault.DIED, "the process of the function ended with 3"),
        ("end", Fault.DIED, "the process of the function ended with 0"),
        ("leave", Fault.RAISED, "SystemExit: 3"),
        ("interrupt", Fault.RAISED, "KeyboardInterrupt: no message"),
        ("cancel", Fault.RAISED, "CancelledError: no message"),
        ("unprintable", Fault.RAISED, "Unprintable: its message cannot be made"),
        ("unprintable base", Fault.RAISED, "UnprintableBase: its message cannot be made"),
        ("read", Fault.RAISED, "EOFError: EOF when reading a line"),
        ("nan", Fault.NOT_A_GRADE, NOT.format("nan")),
        ("text", Fault.NOT_A_GRADE, NOT.format("'1'")),
    ],
)
def test_a_fault_costs_its_own_response_and_no_other(pool: RewardPool, response: str, fault: Fault, why: str) -> None:
    graded, before = pool.graded, pool.faults[fault]
    assert grade(pool, "7", response, "8", "7") == [Graded(1.0), Graded(0.0, fault, why), Graded(0.0), Graded(1.0)]
    assert (pool.graded, pool.faults[fault]) == (graded + 4, before + 1)
    assert pool.last_fault == Graded(0.0, fault, why)


@pytest.mark.parametrize("response", ["7", "hang"])
def test_every_call_that_ends_is_progress(
    pool: RewardPool, response: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOG_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setattr(pool, "_heartbeat", Heartbeat())
    assert last_beat(tmp_path) == 0.0
    grade(pool, response)
    assert last_beat(tmp_path) > 0.0


def test_a_fork_that_a_function_leaves_behind_answers_nothing(pool: RewardPool) -> None:
    assert grade(pool, *["fork"] * 20, *["7"] * 20) == [Graded(0.0)] * 20 + [Graded(1.0)] * 20


@pytest.mark.parametrize(
    ("then", "fault"), [("hang", Fault.TIMED_OUT), ("die", Fault.DIED), ("end", Fault.DIED), ("7", None)]
)
def test_what_a_process_started_ends_with_it(names: Callable[[], list[str]], then: str, fault: Fault | None) -> None:
    pool = RewardPool(load=misbehaving, workers=1, timeout_s=HANG_S)
    try:
        assert grade(pool, f"start {then}")[0].fault is fault
        if fault is not None:
            until(lambda: "sleep" not in names())
    finally:
        pool.close()
    until(lambda: not names())


def test_a_fork_that_lives_does_not_hold_up_the_end(names: Callable[[], list[str]], tmp_path: Path) -> None:
    """Nor do responses that wait, of more than a pipe holds."""
    pool = RewardPool(load=misbehaving, workers=1, timeout_s=600)
    closing = threading.Thread(target=pool.close, daemon=True)

    async def close_at_work() -> None:
        await pool.grade(Response("fork lives", "7"))
        waiting = [asyncio.ensure_future(pool.grade(Response(str(tmp_path / "hang"), "7" * 20_000))) for _ in range(20)]
        while not (tmp_path / "hang").exists():
            await asyncio.sleep(0.01)
        closing.start()
        await asyncio.wait(waiting, timeout=ENDS_WITHIN_S)

    asyncio.run(close_at_work())
    closing.join(ENDS_WITHIN_S)
    assert not closing.is_alive()
    until(lambda: not names())


def hang_in_a_pool(file: str) -> None:
    grade(RewardPool(load=misbehaving, workers=1, timeout_s=600), f"start {file}")


def test_the_processes_of_a_parent_that_is_killed_end(names: Callable[[], list[str]], tmp_path: Path) -> None:
    """Who kills it and its group does not reach theirs."""
    parent = multiprocessing.get_context("spawn").Process(target=hang_in_a_pool, args=(str(tmp_path / "hang"),))
    parent.start()
    until((tmp_path / "hang").exists)
    parent.kill()
    parent.join()
    until(lambda: not names())


def test_any_function_is_called_in_the_pool(pool: RewardPool) -> None:
    graded = pool.graded
    assert asyncio.run(pool.call(divmod, 7, 2)) == (3, 1)
    for function, timeout_s, fault, why in (
        (time.sleep, 0.2, Fault.TIMED_OUT, "no answer after 0.2 s"),
        (os._exit, None, Fault.DIED, "the process of the function ended with 3"),
        (int, None, Fault.RAISED, "ValueError: invalid literal for int() with base 10: 'x'"),
        (threading.Lock, None, Fault.RAISED, "TypeError: cannot pickle '_thread.lock' object"),
    ):
        arguments = {time.sleep: (9,), os._exit: (3,), int: ("x",)}.get(function, ())
        with pytest.raises(CallFailed) as raised:
            asyncio.run(pool.call(function, *arguments, timeout_s=timeout_s))
        assert (raised.value.fault, raised.value.why) == (fault, why)
    assert pool.graded == graded


def test_more_responses_than_processes_wait_for_their_turn(pool: RewardPool) -> None:
    """The time limit counts from when a process takes a response: waiting is no fault."""
    found = grade(pool, "hang", "hang", *(["7"] * 100))
    assert [each.fault for each in found[:2]] == [Fault.TIMED_OUT] * 2
    assert found[2:] == [Graded(1.0)] * 100


def test_a_process_that_is_killed_while_it_waits_costs_nothing_and_is_told(tmp_path: Path) -> None:
    reported = threading.Event()
    pool = RewardPool(load=misbehaving, workers=1, timeout_s=HANG_S, on_idle_death=reported.set)
    try:
        assert grade(pool, str(tmp_path / "waiting")) == [Graded(0.0)]
        os.kill(int((tmp_path / "waiting").read_text()), signal.SIGKILL)
        assert reported.wait(60)
        reported.clear()
        assert grade(pool, "7", "8") == [Graded(1.0), Graded(0.0)]
        assert (pool.graded, pool.faults.total()) == (3, 0)
    finally:
        pool.close()
    assert not reported.wait(3)  # it was closed


def test_one_that_waits_while_another_is_at_work_is_told_too(tmp_path: Path) -> None:
    reported = threading.Event()
    pool = RewardPool(load=misbehaving, workers=2, timeout_s=HANG_S, on_idle_death=reported.set)
    names = ("slow-1", "slow-2", "hang")

    async def hang_and_kill() -> Graded:
        at_work = asyncio.ensure_future(pool.grade(Response(str(tmp_path / "hang"), "7")))
        while not (tmp_path / "hang").exists() or not (tmp_path / "hang").read_text():
            await asyncio.sleep(0.01)
        first, second, busy = ((tmp_path / name).read_text() for name in names)
        assert first != second and not reported.is_set()
        os.kill(int(second if busy == first else first), signal.SIGKILL)
        return await at_work

    try:
        assert grade(pool, "die")[0].fault is Fault.DIED  # at work: that is told with its response
        for _ in range(10):  # until the one that died has been replaced, both go to the other
            assert grade(pool, *(str(tmp_path / name) for name in names[:2])) == [Graded(0.0)] * 2
            if len({(tmp_path / name).read_text() for name in names[:2]}) == 2:
                break
        assert asyncio.run(hang_and_kill()).fault is Fault.TIMED_OUT
        assert reported.wait(60)
    finally:
        pool.close()


def test_one_that_died_before_it_was_heard_what_it_took_was_not_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is its response waited for until the time limit, nor the pool given up."""
    reported = threading.Event()
    pool = RewardPool(load=misbehaving, workers=2, timeout_s=30, on_idle_death=reported.set)
    hear = PoolManager.process_next_message
    monkeypatch.setattr(PoolManager, "process_next_message", lambda self, s: (time.sleep(0.2), hear(self, s)))
    first = pool._pool
    try:
        assert grade(pool, "die") == [Graded(0.0, Fault.DIED, "the process of the function ended with 3")]
        assert not reported.is_set() and pool._pool is first
    finally:
        pool.close()


class Forgetful:
    """A pool that breaks while a task is on its way into it: pebble never looks at that one's future again."""

    def __init__(self, pool: ProcessPool) -> None:
        self.active = True
        self.stop, self.join = pool.stop, pool.join

    def schedule(self, *_: object, **__: object) -> Future[float]:
        self.active = False
        return Future()


def test_a_response_that_a_breaking_pool_forgot_is_graded_by_the_next() -> None:
    pool = RewardPool(load=misbehaving, workers=1, timeout_s=HANG_S)
    pool._pool = Forgetful(pool._pool)
    try:
        assert grade(pool, "7") == [Graded(1.0)]
    finally:
        pool.close()


def test_a_pool_that_breaks_before_it_has_a_response_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = RewardPool(load=misbehaving, workers=1, timeout_s=HANG_S)
    inner = pool._pool
    schedule = inner.schedule

    def break_first(*arguments: Any, **others: Any) -> object:
        inner._context.status = PoolStatus.ERROR  # as a thread of pebble's does
        return schedule(*arguments, **others)

    monkeypatch.setattr(inner, "schedule", break_first)
    try:
        assert grade(pool, "7") == [Graded(1.0)]
    finally:
        pool.close()


@pytest.mark.parametrize("code", [0, 1])
def test_processes_that_cannot_live_cost_their_responses_and_no_more(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Each response is tried twice, and the caller is told."""
    monkeypatch.setattr(rewards, "_begin", functools.partial(ends_at_once, code))
    pool = RewardPool(load=misbehaving, workers=1, timeout_s=HANG_S)
    try:
        assert grade(pool, "7", "8") == [GONE, GONE]
    finally:
        pool.close()


def ends_at_once(code: int, *_: object) -> None:
    os._exit(code)


def slow_to_load() -> tuple[RewardFunction, ...]:
    time.sleep(2 * HANG_S)
    return misbehaving()


def slow_to_fail() -> tuple[RewardFunction, ...]:
    time.sleep(2 * HANG_S)
    raise ValueError("no such file\nas this")


def interrupts() -> tuple[RewardFunction, ...]:
    raise KeyboardInterrupt


def hangs_in_c() -> tuple[RewardFunction, ...]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    re.fullmatch("(a|aa)+", "a" * 99 + "b")  # with the interpreter's lock
    return ()


@pytest.mark.parametrize(
    ("load", "graded"),
    [
        (slow_to_load, [Graded(1.0), Graded(0.0)]),
        (interrupts, [Graded(0.0, Fault.RAISED, "KeyboardInterrupt: no message")] * 2),
        (slow_to_fail, [Graded(0.0, Fault.RAISED, "ValueError: no such file")] * 2),
    ],
)
def test_loading_takes_no_time_of_a_response(
    load: Callable[[], tuple[RewardFunction, ...]], graded: list[Graded]
) -> None:
    pool = RewardPool(load=load, workers=1, timeout_s=HANG_S)
    try:
        assert grade(pool, "7", "8") == graded
    finally:
        pool.close()


def begins_soon(*arguments: Any) -> None:
    rewards.LOADS_WITHIN_S = HANG_S
    BEGIN(*arguments)


BEGIN = rewards._begin


def test_a_load_that_hangs_costs_its_responses_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "_begin", begins_soon)
    pool = RewardPool(load=hangs_in_c, workers=1, timeout_s=HANG_S)
    try:
        assert grade(pool, "7", "8") == [GONE, GONE]
    finally:
        pool.close()


def test_a_pool_that_was_closed_starts_no_process_again() -> None:
    before = set(multiprocessing.active_children())
    pool = RewardPool(load=misbehaving, workers=1, timeout_s=HANG_S)
    assert grade(pool, "7") == [Graded(1.0)]
    pool.close()
    assert grade(pool, "7") == [GONE]
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 1), (4, 2), (16, 8), (128, 8)])
def test_workers_leave_cores_to_the_engines(cores: int, workers: int) -> None:
    assert num_workers(cores) == workers


def mathematics() -> tuple[RewardFunction, ...]:
    return TASKS["dapo-math"].rewards()


def test_mathematics_is_compared_in_a_worker() -> None:
    pool = RewardPool(load=mathematics, workers=1)
    try:
        answers = ("Answer: \\frac{1}{2}", "Answer: \\frac{1}{3}")
        assert grade(pool, *answers, truth="0.5") == [Graded(1.0), Graded(0.0)]
    finally:
        pool.close()

"""Rewards in processes of their own: a reward function that hangs, dies or raises costs its one response, not the run.

math-verify needs it anyway: it stops itself by `signal.alarm`, which works on a main thread only, and the big numbers
of a wild answer keep the processor inside one instruction that no signal interrupts. pebble's pool ends such a process
and starts another one.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import TimeoutError as GradingTimeout
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import BaseContext
from typing import Any

from pebble import ProcessExpired, ProcessPool
from pebble.pool.process import PoolManager

from appliance.record.liveness import keep_stacks
from appliance.tasks.grading import Fault, Graded, checked
from appliance.tasks.library import TASKS, score

TIMEOUT_S = 30.0  # of one response, from when a process takes it; math-verify's own limits are below
MOST_WORKERS = 8
_LOOK_EVERY_S = 1.0  # at the pool, while a grade is waited for

Function = Callable[[str, str, str], float]


def num_workers(cores: int) -> int:
    """Half of the cores, for the engines need some; at least one."""
    return max(1, min(MOST_WORKERS, cores // 2))


def score_task(kind: str, response: str, truth: str) -> float:
    """The tasks' own reward function. Runs in a worker of the pool."""
    return score(kind, response=response, truth=truth)


class _TellingProcesses(PoolManager):
    """Hears of every process that ended by itself; pebble tells only of those that were at work."""

    def __init__(self, on_idle_death: Callable[[], None], *others: Any) -> None:
        super().__init__(*others)
        self._on_idle_death = on_idle_death

    def handle_worker_expiration(self, expiration: tuple[int, int]) -> None:
        worker, _ = expiration
        if worker not in {task.worker_id for task in tuple(self.task_manager.tasks.values())}:
            self._on_idle_death()
        super().handle_worker_expiration(expiration)


class _TellingPool(ProcessPool):
    def __init__(self, on_idle_death: Callable[[], None], *, context: BaseContext, **others: Any) -> None:
        super().__init__(context=context, **others)
        self._pool_manager = _TellingProcesses(on_idle_death, self._context, context)


class RewardPool:
    """Grades responses. graded: how many so far.  faults: how many of them could not be graded, by why.

    last_fault: the newest of them, None when there is none.
    """

    def __init__(
        self,
        *,
        kind: str,
        function: Function = score_task,
        workers: int | None = None,
        timeout_s: float = TIMEOUT_S,
        on_idle_death: Callable[[], None] = lambda: None,
    ) -> None:
        """kind: the task, whose imports are made ahead of the first response.

        function: (task kind, response, truth) -> 0..1, importable by its name in another process.
        on_idle_death: called on a thread within seconds after a process died that was at no response.
        """
        self.graded = 0
        self.faults: Counter[Fault] = Counter()
        self.last_fault: Graded | None = None
        self._function = function
        self._timeout_s = timeout_s
        self._kind = kind
        self._workers = workers or num_workers(os.cpu_count() or 1)
        self._on_idle_death = on_idle_death
        self._is_closed = False
        self._pool = self._started()

    def _started(self) -> ProcessPool:
        pool = _TellingPool(
            self._on_idle_death,
            max_workers=self._workers,
            initializer=_begin,
            initargs=(self._kind,),
            # A fork of this process, with its threads and Ray's, may deadlock.
            context=multiprocessing.get_context("spawn"),
        )
        pool.schedule(_nothing)  # starts the processes now
        return pool

    async def grade(self, kind: str, response: str, truth: str) -> Graded:
        """kind: the task of the response.  Never raises: what goes wrong with one response is counted."""
        graded = await self._outcome(kind, response, truth)
        self.graded += 1
        if graded.fault is not None:
            self.faults[graded.fault] += 1
            self.last_fault = graded
        return graded

    async def _outcome(self, kind: str, response: str, truth: str) -> Graded:
        try:
            try:
                value = await self._value(kind, response, truth)
            except BrokenProcessPool:  # by a process that died while it waited: no fault of this response
                value = await self._value(kind, response, truth)
            return checked(value)
        except GradingTimeout:
            return Graded(0.0, Fault.TIMED_OUT, f"no grade after {self._timeout_s:g} s")
        except ProcessExpired as error:
            return Graded(0.0, Fault.DIED, f"the process of the reward function ended with {error.exitcode}")
        except BrokenProcessPool:
            return Graded(0.0, Fault.DIED, "the processes of the reward function are gone")
        except Exception as error:  # the boundary of a reward function: counted, and the run goes on
            return Graded(0.0, Fault.RAISED, f"{type(error).__name__}: {_first_line(error)}")

    async def _value(self, kind: str, response: str, truth: str) -> object:
        """What the reward function returns. Raises what it raises, and BrokenProcessPool.

        pebble gives up a pool with all that waits in it when a process dies while none is at work: another one is made
        then. What was on its way at that moment it forgets, so that its future alone is not to be waited for.
        """
        if self._is_closed:
            raise BrokenProcessPool
        if not self._pool.active:
            self._end()
            self._pool = self._started()
        pool = self._pool
        scheduled = pool.schedule(self._function, args=(kind, response, truth), timeout=self._timeout_s)
        future = asyncio.wrap_future(scheduled)
        try:
            while not (await asyncio.wait({future}, timeout=_LOOK_EVERY_S))[0]:
                if not pool.active:
                    raise BrokenProcessPool
            return future.result()
        finally:
            future.cancel()  # for a rollout that is abandoned; one that is done stays so

    def close(self) -> None:
        """End the processes, whatever they are at. Nothing is graded any more."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        self._pool.stop()
        self._pool.join()


def _begin(kind: str) -> None:
    """In each process of the pool, before its first response."""
    keep_stacks("reward")
    TASKS[kind].import_reward()


def _nothing() -> None:
    pass


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]

"""Rewards: how a response is graded, in separate processes, and what one that could not be graded costs.

A reward function that hangs, dies or raises costs its one response, not the run: pebble's pool ends such a process and
starts another one. No thread can be ended so: a big number keeps the processor inside one instruction that no signal
interrupts.

A reward function that raises, hangs, dies or returns no finite number says nothing about the response. In training
such a sample gets the mean reward of the others of its prompt, so the mean of the group stays what it is, and 0 in
place of its advantage. (A reward of 0 would teach that the response was wrong.) In validation it counts as wrong (0, or
the least of its set where rewards go below 0): there the mean must not become better by failures.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as GradingTimeout
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from pebble import ProcessExpired, ProcessPool
from pebble.common import stop_process
from pebble.pool.base_pool import PoolContext
from pebble.pool.process import PoolManager, WorkerManager

from appliance.errors import GuardStop
from appliance.record.code import with_copies
from appliance.record.events import append_event
from appliance.record.liveness import Heartbeat, keep_stacks
from appliance.record.plan import RunPlan
from appliance.tasks.grading import Fault, Graded, grade, in_words, weigh_rewards
from appliance.tasks.library import rewards_of
from appliance.tasks.task import Response, RewardFunction
from appliance.terms.counts import counted

TIMEOUT_S = 30.0  # of one response, from when a process takes it
LOADS_WITHIN_S = 60.0  # a process its rewards, before its first response
MOST_WORKERS = 8
IDLE_DEATH = "a reward process died while it waited for a response"
_LOOK_EVERY_S = 1.0  # at the pool, while a grade is waited for
_READS_WITHIN_S = 2.0  # what a process wrote before it ended

T = TypeVar("T")
_loaded: Sequence[RewardFunction] | BaseException  # in a process of the pool, or why there are none


def num_workers(cores: int) -> int:
    """Return half of the cores, for the engines need some; at least one."""
    return max(1, min(MOST_WORKERS, cores // 2))


class CallFailed(Exception):
    """A function that was called in the pool gave nothing."""

    fault: Fault
    """Kind of the failure."""
    why: str
    """Reason, in words."""

    def __init__(self, fault: Fault, why: str) -> None:
        super().__init__(why)
        self.fault = fault
        self.why = why


class _ProcessGroups(WorkerManager):
    """Each process has its own group (`_begin`), which ends with it, and with it what a function has started."""

    def inspect_workers(self) -> tuple[tuple[int, int | None], ...]:
        """Return those that ended by themselves, also with 0: pebble would take that for the end of a process's
        work, which has none here."""
        ended = tuple((pid, process.exitcode) for pid, process in self.workers.items() if not process.is_alive())
        for pid, _ in ended:
            del self.workers[pid]
            _end_group(pid)
        return ended

    def maybe_stop_worker(self, worker_id: int) -> bool:
        was_there = worker_id in self.workers
        is_ended = bool(super().maybe_stop_worker(worker_id))
        if was_there and is_ended:
            _end_group(worker_id)
        return is_ended

    def force_stop_workers(self) -> None:
        for pid in tuple(self.workers):
            stop_process(self.workers.pop(pid))
            _end_group(pid)


def _end_group(leader: int) -> None:
    """End what is left of a process's group. Called right after the leader was reaped: its number is given to no
    other process while one of the group lives, and where none does, not before all other numbers had their turn."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


class _TellingProcesses(PoolManager):
    """Hears of every process that ended by itself; pebble tells only of those that were at work, and takes for idle, or
    still at the task before, one whose last messages have not been read."""

    def __init__(self, on_idle_death: Callable[[], None], context: PoolContext, processes: BaseContext) -> None:
        super().__init__(context, processes)
        self.worker_manager = _ProcessGroups(context.workers, context.worker_parameters, processes)
        self._on_idle_death = on_idle_death
        self._reads = 0

    def process_next_message(self, timeout: float) -> None:
        """Read a message, on a thread that calls this over and over."""
        try:
            super().process_next_message(timeout)
        finally:
            self._reads += 1

    def handle_worker_expiration(self, expiration: tuple[int, int]) -> None:
        worker, _ = expiration
        self._wait_until_all_is_read()
        if worker not in {task.worker_id for task in tuple(self.task_manager.tasks.values())}:
            self._on_idle_death()
        super().handle_worker_expiration(expiration)

    def _wait_until_all_is_read(self) -> None:
        """Wait at most _READS_WITHIN_S: a process that was killed within a message leaves one that has no end."""
        last = time.monotonic() + _READS_WITHIN_S
        done = None
        while time.monotonic() < last and done in (None, self._reads):
            if done is None and not self.worker_manager.pool_channel.poll(0):
                done = self._reads  # what was there is read when this one has ended
            time.sleep(0.01)


class _TellingPool(ProcessPool):
    def __init__(self, on_idle_death: Callable[[], None], *, context: BaseContext, **others: Any) -> None:
        super().__init__(context=context, **others)
        self._pool_manager = _TellingProcesses(on_idle_death, self._context, context)


class RewardPool:
    """A pool of processes that grade responses."""

    graded: int
    """Number of responses that were given so far."""
    faults: Counter[Fault]
    """Number of responses that could not be graded, by the kind of the failure."""
    last_fault: Graded | None
    """Newest response that could not be graded; None when there is none."""

    def __init__(
        self,
        *,
        load: Callable[[], Sequence[RewardFunction]],
        import_path: Sequence[str] = (),
        workers: int | None = None,
        timeout_s: float = TIMEOUT_S,
        on_idle_death: Callable[[], None] = lambda: None,
    ) -> None:
        """load: gives the rewards; called in each process at its start, so it can be pickled. What it raises costs each
        response; a process whose loading takes more than LOADS_WITHIN_S ends.

        import_path: further folders of modules, for each process.

        on_idle_death: called on a thread within seconds after a process died that was at no response.
        """
        self.graded = 0
        self.faults = Counter()
        self.last_fault = None
        self._timeout_s = timeout_s
        self._load = load
        self._import_path = tuple(import_path)
        self._workers = workers or num_workers(os.cpu_count() or 1)
        self._on_idle_death = on_idle_death
        self._heartbeat = Heartbeat()
        self._is_closed = False
        self._start()

    def _start(self) -> None:
        self._pool = _TellingPool(
            self._on_idle_death,
            max_workers=self._workers,
            initializer=_begin,
            initargs=(self._load, self._import_path),
            # A fork of this process, with its threads and Ray's, may deadlock.
            context=multiprocessing.get_context("spawn"),
        )
        self._pool.schedule(os.getpid)  # starts the processes

    async def grade(self, response: Response) -> Graded:
        """Grade a response. Never raises: what goes wrong with one response is counted."""
        graded = await self._outcome(response)
        self.graded += 1
        if graded.fault is not None:
            self.faults[graded.fault] += 1
            self.last_fault = graded
        return graded

    async def _outcome(self, response: Response) -> Graded:
        try:
            return await self.call(_grade, response)
        except CallFailed as failed:
            return Graded(0.0, failed.fault, failed.why)

    async def call(self, function: Callable[..., T], *arguments: object, timeout_s: float | None = None) -> T:
        """Call a function in a process of the pool, and return its value: `await pool.call(use_tool, file, name,
        text)`.

        function: of a module of ours, which is found by its name there; it, its arguments and its value are pickled.
        timeout_s: from when a process takes it; None: the pool's, of one response.
        Raises CallFailed when it raises, hangs or its process dies: that costs this call and no other.
        """
        timeout_s = timeout_s or self._timeout_s
        try:
            try:
                answer = await self._run(_called, function, arguments, timeout_s=timeout_s)
            except BrokenProcessPool:  # by a process that died while it waited: no fault of this call
                answer = await self._run(_called, function, arguments, timeout_s=timeout_s)
        except GradingTimeout:
            raise CallFailed(Fault.TIMED_OUT, f"no answer after {timeout_s:g} s") from None
        except ProcessExpired as error:
            raise CallFailed(Fault.DIED, f"the process of the function ended with {error.exitcode}") from None
        except BrokenProcessPool:
            raise CallFailed(Fault.DIED, "the processes of the pool are gone") from None
        except Exception as error:  # what it returned cannot be pickled
            raise CallFailed(Fault.RAISED, in_words(error)) from None
        finally:
            self._heartbeat.beat()  # what takes long and has its time limit is no stall
        if answer.raised:
            raise CallFailed(Fault.RAISED, answer.raised)
        return answer.value

    async def _run(self, function: Callable[..., T], *arguments: object, timeout_s: float) -> T:
        """Run a function in a process of the pool, within the time limit. Raises what it raises, and BrokenProcessPool.

        pebble gives up a pool with all that waits in it when a process dies while none is at work: another one is made
        then. What was on its way at that moment it forgets, so that its future alone is not to be waited for.
        """
        if self._is_closed:
            raise BrokenProcessPool
        try:
            if not self._pool.active:
                self._end()
                self._start()
            pool = self._pool
            scheduled = pool.schedule(function, args=arguments, timeout=timeout_s)
        except RuntimeError as error:  # pebble's: it broke just now
            raise BrokenProcessPool from error
        future = asyncio.wrap_future(scheduled)
        try:
            while not (await asyncio.wait({future}, timeout=_LOOK_EVERY_S))[0]:
                if not pool.active:
                    raise BrokenProcessPool
            return future.result()
        finally:
            future.cancel()  # for a rollout that is abandoned; one that is done stays so

    def close(self) -> None:
        """End the processes, whatever they are doing. Nothing is graded any more."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        self._pool.stop()
        self._pool.join()


def pool_for(plan: RunPlan) -> RewardPool:
    """Make the pool of a run: it executes the run's copies of the user's files."""
    return RewardPool(
        load=functools.partial(rewards_of, with_copies(plan), files=plan.task_files),
        import_path=plan.task_files.import_path,
        workers=plan.task.reward_workers,
        timeout_s=plan.task.reward_timeout_s,
        on_idle_death=functools.partial(note_idle_death, Path(plan.run_dir)),
    )


def _begin(load: Callable[[], Sequence[RewardFunction]], import_path: tuple[str, ...]) -> None:
    """Begin a process of the pool. Loading may run the user's code, in its own time and not in that of the first
    response: whatever it contains, a thread that needs no interpreter ends the process after LOADS_WITHIN_S."""
    os.setpgid(0, 0)
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    keep_stacks("reward")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # what reads stdin finds its end
    os.close(nothing)
    sys.path.extend(import_path)
    global _loaded
    pid = os.getpid()
    faulthandler.dump_traceback_later(LOADS_WITHIN_S, exit=True)
    try:
        _loaded = load()
    except BaseException as error:  # the boundary of the user's code: each response is a fault
        _loaded = error
    if os.getpid() != pid:
        os._exit(0)  # as below
    faulthandler.cancel_dump_traceback_later()


def _end_with(parent: BaseProcess) -> None:
    """End this process's group with its parent, on a thread: who ends the parent's group does not reach this one."""
    parent.join()
    os.killpg(0, signal.SIGKILL)


class _Answer(NamedTuple, Generic[T]):
    value: T
    raised: str = ""


def _called(function: Callable[..., T], arguments: tuple[object, ...]) -> _Answer[T] | _Answer[None]:
    """Call a function in a process of the pool. An exception comes back in words: to read one of the user's is to
    run code of it."""
    pid = os.getpid()
    answer: _Answer[T] | _Answer[None]
    try:
        answer = _Answer(function(*arguments))
    except BaseException as error:  # the boundary of the user's code: counted, and the run continues
        answer = _Answer(None, raised=in_words(error))
    if os.getpid() != pid:
        os._exit(0)  # a fork that the function left behind: it would answer as well
    return answer


def _grade(response: Response) -> Graded:
    if isinstance(_loaded, BaseException):
        raise _loaded.with_traceback(None)  # which would grow with each response
    return weigh_rewards(grade(_loaded, response))


def note_idle_death(run_dir: Path) -> None:
    """Write an event for people: it costs nothing."""
    why = "no reward is lost: the next response starts another process"
    append_event(run_dir, kind="note", what=IDLE_DEATH, why=why)


def fill_neutral(values: Iterable[float], *, known: Sequence[bool]) -> list[float]:
    """Return a value per sample of one prompt; one that is not known gets the mean of those that are, 0 where there
    is none. The mean is exact: that of equal numbers is that number, and a group of them stays one for DAPO's
    filter."""
    all_values = list(values)
    those = [value for value, is_known in zip(all_values, known, strict=True) if is_known]
    mean = statistics.mean(those) if 0 < len(those) < len(all_values) else 0.0
    return [value if is_known else mean for value, is_known in zip(all_values, known, strict=True)]


def neutral_parts(graded: Sequence[Graded]) -> list[dict[str, float]]:
    """Return per sample of one prompt what each reward gave, where it applies; a fault has the means of those
    without one."""
    known = [dict(each.parts) for each in graded if each.fault is None]
    means = _means(known) if len(known) < len(graded) else {}
    return [means if each.fault is not None else dict(each.parts) for each in graded]


def known_parts(graded: Sequence[Graded]) -> list[dict[str, float] | None]:
    """Return per sample of one prompt what each reward gave, where it applies; None for a fault."""
    return [None if each.fault is not None else dict(each.parts) for each in graded]


def reward_means(parts: Iterable[Mapping[str, float]], *, names: Iterable[str]) -> dict[str, float | None]:
    """Return `reward/<name>`: the mean over the samples to which it applies, None where there is none."""
    means = _means(parts)
    return {f"reward/{name}": means.get(name) for name in names}


def _means(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for each in parts:
        for name, value in each.items():
            values[name].append(value)
    return {name: statistics.mean(found) for name, found in values.items()}


class RewardFaults:
    """Counter of failed rewards: reports once a step and validation, and stops a run whose rewards fail too often."""

    def __init__(self, run_dir: Path, *, most: float) -> None:
        """most: share of a step's responses that may fail, 0..1."""
        self._run_dir = run_dir
        self._most = most
        self._graded = 0
        self._faults: Counter[Fault] = Counter()

    def end(self, responses: str, *, pool: RewardPool) -> int:
        """Judge the rewards of a step or a validation. Returns how many of them failed. responses: `step 3`, `the
        validation of step 3`.  Raises GuardStop when more than `most` of them failed."""
        new = pool.faults - self._faults
        count, num_graded = new.total(), pool.graded - self._graded
        self._graded, self._faults = pool.graded, Counter(pool.faults)
        if not count:
            return 0
        kinds = ", ".join(f"{number} {fault}" for fault, number in sorted(new.items()))
        why = pool.last_fault.why if pool.last_fault is not None else ""
        text = f"{count} of {counted(num_graded, 'reward')} of {responses} failed ({kinds})"
        append_event(self._run_dir, kind="reward", what=text, why=why, failed=count, graded=num_graded)
        if count > self._most * num_graded:
            hint = f"the last one: {why}; guard.reward_failures says how many may fail"
            raise GuardStop(f"{text}, more than {self._most:.0%}", hint=hint)
        return count

"""The rollout engines of a run: watched, ended and started again while the trainer keeps its state and its place.

For a change of scheme that no weight update can make. New engines are made by the code that made the first ones (verl's
LLMServerManager), under the same names, so that the senders of weights find them. What they compute in is written
to `sync/engines.json` before they start. They hold the model that the run began with until their first weight update,
which proves all of them whole; the trainer lets nothing generate before.

Nothing here waits without a limit but the start itself, which is watched as the first one is (launch/train.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
import torch
from ray.actor import ActorHandle

from appliance.errors import ApplianceError, EngineError, last_line
from appliance.record.attestations import set_attestations_aside
from appliance.sync.precision import Generation, write_generation
from appliance.terms.schemes import AS_PLANNED, Precision

if TYPE_CHECKING:
    from verl.workers.rollout.llm_server import LLMServerManager
    from verl.workers.rollout.replica import RolloutReplica

END_WITHIN_S = 60.0  # a server that was asked to end its engine; the engine itself has a third of it
GONE_WITHIN_S = 30.0  # processes and names, once their server was killed
KILLED_WITHIN_S = 10.0  # processes that were not gone by then
ANSWER_WITHIN_S = 60.0  # a trainer's worker, which has nothing else to do
LOOK_EVERY_S = 0.05
WATCH_EVERY_S = 2.0
SERVER_ANSWERS_WITHIN_S = 60.0  # one that loads a core for a minute is slow, not dead: its event loop still answers
_SERVER_NAMES = "vllm_server_"  # of verl's servers, see its vLLMReplica


@dataclass(frozen=True)
class Restart:
    """One change of all engines of a run."""

    generation: Generation
    """Generation of the new engines."""
    ended: tuple[int, ...]
    """Ids of the old engines' processes."""
    end_s: float
    """Seconds until the old engines were gone."""
    start_s: float
    """Seconds from then until the new engines had started."""

    @property
    def seconds(self) -> float:
        return self.end_s + self.start_s

    @property
    def text(self) -> str:
        number = self.generation.number
        return f"rollout engines of generation {number} in place of {number - 1}, after {self.seconds:.1f} s"

    def numbers(self) -> dict[str, object]:
        """Return JSON values for the event."""
        return {
            "generation": self.generation.number,
            "after_sync": self.generation.after_sync,
            "precision": self.generation.precision.text,
            "end_s": round(self.end_s, 3),
            "start_s": round(self.start_s, 3),
            "ended": list(self.ended),
        }


class RolloutEngines:
    """The rollout engines of an attempt, one generation after another."""

    generation: Generation
    """Engines that run, or that are about to start."""
    restart_s: float
    """Seconds that restarts took, of which no line of metrics says anything yet."""

    def __init__(
        self, run_dir: Path, *, on_death: Callable[[ApplianceError], None], precision: Precision = AS_PLANNED
    ) -> None:
        """To be made before the first engines start. on_death: see EngineWatch.  precision: what they are to compute
        in."""
        self._run_dir = run_dir
        self._on_death = on_death
        self._engine_watch: EngineWatch | None = None
        self.restart_s = 0.0
        self.generation = Generation(precision=precision)
        write_generation(run_dir, self.generation)

    def watch(self, servers: list[ActorHandle]) -> None:
        self._engine_watch = EngineWatch(servers, on_death=self._on_death)

    def stop_watching(self) -> None:
        """Stop the watch before the engines are ended on purpose."""
        if self._engine_watch is not None:
            self._engine_watch.stop()

    def take_restart(self) -> dict[str, float]:
        """Return what the next line of metrics says of restarts."""
        seconds, self.restart_s = self.restart_s, 0.0
        return {"engine_restart_s": round(seconds, 4)} if seconds else {}

    def restart(
        self, old: LLMServerManager, *, precision: Precision, after_sync: int, start: Callable[[], LLMServerManager]
    ) -> tuple[LLMServerManager, Restart]:
        """End the engines of `old`, start others and watch them. Nobody may wait for an answer of the old ones.

        after_sync: weight updates so far.  start: makes a manager with running engines, as verl's trainer does.
        Raises EngineError when an engine died before, does not end, or when the new ones do not start.
        """
        self.stop_watching()
        began = time.monotonic()
        ended = _end(old.get_replicas())
        _free_memory(old.get_replicas())
        set_attestations_aside(self._run_dir, role="rollout", name=f"generation-{self.generation.number}")
        gone = time.monotonic()
        self.generation = self.generation.next(precision, after_sync=after_sync)
        write_generation(self._run_dir, self.generation)
        new = _started(start)
        restart = Restart(self.generation, ended, end_s=gone - began, start_s=time.monotonic() - gone)
        self.restart_s += restart.seconds
        self.watch(new.server_handles)
        return new, restart


def _started(start: Callable[[], LLMServerManager]) -> LLMServerManager:
    try:
        return start()
    except ApplianceError:
        raise
    except Exception as error:  # the boundary of verl, vLLM and Ray: in whatever words, the engines did not start
        cause = getattr(error, "cause", None)  # what was raised inside a Ray worker
        if isinstance(cause, ApplianceError):
            raise cause from error
        raise EngineError(f"the new rollout engines did not start: {last_line(error)}", hint="see the log") from error


def _end(replicas: list[RolloutReplica]) -> tuple[int, ...]:
    """End the engines, and return the ids of their processes. Raises EngineError where one is still there.

    Of an engine on several hosts the first one's server ends last: the others would end by themselves when it is gone,
    which looks like a death.
    """
    beside = [_beside(replica) for replica in replicas]
    ended: list[tuple[ActorHandle, tuple[int, ...]]] = []
    for wave in ([pair for pairs in beside for pair in pairs[1:]], [pairs[0] for pairs in beside]):
        asked = [(worker, server.end_engine.remote()) for server, worker in wave]
        ended += [(worker, _processes(answer)) for worker, answer in asked]
        for server, _ in wave:
            ray.kill(server)
    _wait_for_names()
    looks = [worker.__ray_call__.remote(_left_over, pids, GONE_WITHIN_S) for worker, pids in ended]
    within_s = GONE_WITHIN_S + KILLED_WITHIN_S + ANSWER_WITHIN_S
    living = [str(pid) for found in _answers(looks, within_s=within_s) for pid in found]
    if living:
        raise EngineError(f"the rollout engines did not end: processes {', '.join(living)} are still there")
    return tuple(pid for _, pids in ended for pid in pids)


def _free_memory(replicas: list[RolloutReplica]) -> None:
    """Free memory on every rank's GPU: a new engine claims its share of the memory when it starts, and the trainer's
    worker beside it holds what it may need again."""
    workers = [worker for replica in replicas for worker in replica.workers]
    _answers([worker.__ray_call__.remote(_empty_cache) for worker in workers], within_s=ANSWER_WITHIN_S)


def _answers(asked: list[ray.ObjectRef], *, within_s: float) -> list[Any]:
    try:
        return ray.get(asked, timeout=within_s)
    except ray.exceptions.GetTimeoutError as error:
        raise EngineError(f"the trainer's workers did not answer within {within_s:.0f} s, between engines") from error


def _beside(replica: RolloutReplica) -> list[tuple[ActorHandle, ActorHandle]]:
    """Pair each server of a replica, one per host, with a worker of the trainer on the same host."""
    per_host = len(replica.workers) // len(replica.servers)
    return list(zip(replica.servers, replica.workers[::per_host], strict=True))


def _processes(ended: ray.ObjectRef) -> tuple[int, ...]:
    try:
        return tuple(ray.get(ended, timeout=END_WITHIN_S))
    except ray.exceptions.RayActorError as error:
        raise EngineError("a rollout server died before it was to end") from error
    except ray.exceptions.GetTimeoutError as error:
        raise EngineError(f"a rollout engine did not end within {END_WITHIN_S:.0f} s") from error


def _wait_for_names() -> None:
    """Wait until the servers' names are free: Ray gives a name again once it knows that the actor is dead."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while names := [name for name in ray.util.list_named_actors() if name.startswith(_SERVER_NAMES)]:
        if time.monotonic() > deadline:
            raise EngineError(f"the rollout servers did not end: {', '.join(sorted(names))}")
        time.sleep(LOOK_EVERY_S)


def _empty_cache(worker: Any) -> None:
    """Run inside verl's worker."""
    torch.cuda.empty_cache()


def _left_over(worker: Any, pids: tuple[int, ...], within_s: float) -> list[int]:
    """Run inside verl's worker, beside the engine. What is still there after that time is killed; those that survive
    it."""
    processes = [process for pid in pids if (process := _process(pid)) is not None]
    late = _living(processes, within_s=within_s)
    for process in late:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return [process.pid for process in _living(late, within_s=KILLED_WITHIN_S)]


def _living(processes: list[psutil.Process], *, within_s: float) -> list[psutil.Process]:
    deadline = time.monotonic() + within_s
    while (living := [each for each in processes if _lives(each)]) and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
    return living


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _lives(process: psutil.Process) -> bool:
    """Check that a process lives. A number that another process has by now does not count."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class EngineWatch:
    """Watch of the engines while the trainer waits for them.

    An engine that dies in the middle of a weight update leaves verl's sender waiting for an answer that cannot come.
    The trainer's main thread is then inside that wait, so the watch does not raise: it reports and ends the process.
    """

    def __init__(self, servers: list[ActorHandle], *, on_death: Callable[[ApplianceError], None]) -> None:
        """servers: rollout servers with `engine_problem`.  on_death: gets the error about the first problem, on the
        watch's thread, and does not return."""
        self._servers = servers
        self._on_death = on_death
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="engine-watch", daemon=True).start()

    def stop(self) -> None:
        """Stop before the engines are ended on purpose."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(WATCH_EVERY_S):
            for replica, server in enumerate(self._servers):
                problem = _problem(server)
                if problem and not self._over.is_set():
                    hint = "the log has the engine's own words"
                    self._on_death(EngineError(f"rollout engine {replica} {problem}", hint=hint))
                    return


def _problem(server: ActorHandle) -> str:
    """Return what is wrong with a server's engine, or an empty text."""
    try:
        return ray.get(server.engine_problem.remote(), timeout=SERVER_ANSWERS_WITHIN_S)
    except ray.exceptions.GetTimeoutError:
        return f"did not answer for {SERVER_ANSWERS_WITHIN_S:.0f} s"
    except ray.exceptions.RayActorError:
        return "died: its server's process is gone"
    except ray.exceptions.RayError as error:
        return f"cannot be asked: {type(error).__name__}"

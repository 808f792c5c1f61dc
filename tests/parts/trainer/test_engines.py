"""How rollout engines are ended and others take their place; whatever fails on the way has a name and an end."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray

from appliance.errors import ApplianceError, EngineError, SyncError
from appliance.sync.precision import Generation, read_generation
from appliance.trainer import engines
from appliance.trainer.engines import _beside, _empty_cache, _free_memory, _left_over, _started
from appliance.trainer.precision import BF16

# Replicas as verl has them: a server per host, with a name, and workers beside it. An engine is a process that the
# driver started, so that nothing but its server's word ends it.
DRIVER = """
import json, os, signal, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
import ray
from appliance.errors import SyncError
from appliance.sync.precision import read_generation
from appliance.terms.schemes import Precision, Scheme
from appliance.trainer import engines
from appliance.trainer.entry import translate
ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
run_dir = Path(sys.argv[1])

class Process:
    def process(self):
        return os.getpid()

@ray.remote(num_cpus=0)
class Worker(Process):
    pass

@ray.remote(num_cpus=0)
class Server(Process):
    def __init__(self, engine, ends):
        self.engine, self.ends = engine, ends

    def end_engine(self):
        if self.ends:
            os.kill(self.engine, signal.SIGTERM)
        return [os.getpid(), self.engine]

@ray.remote
def fails(error):
    raise error

workers = [Worker.remote(), Worker.remote()]
idle = []

def kill(actor):
    os.kill(ray.get(actor.process.remote()), signal.SIGKILL)

def manager(*, hosts=1, ends=True):
    here = [subprocess.Popen(["sleep", "600"]) for _ in range(hosts)]
    idle.extend(here)
    engines._wait_for_names()  # of a server that was killed
    servers = [
        Server.options(name=f"vllm_server_0_{host}").remote(engine.pid, ends) for host, engine in enumerate(here)
    ]
    pids = [[ray.get(server.process.remote()), engine.pid] for server, engine in zip(servers, here)]
    replica = SimpleNamespace(servers=servers, workers=workers)
    return SimpleNamespace(get_replicas=lambda: [replica], servers=servers, server_handles=[], pids=pids)

def restarted(old, start=manager):
    try:
        return owner.restart(old, precision=Precision(), after_sync=9, start=start)
    except Exception as error:
        named = translate(error) if isinstance(error, ray.exceptions.RayError) else error
        return f"{type(named).__name__}: {named.message}"

(run_dir / "attest").mkdir()
(run_dir / "attest" / "rollout-0-0.json").write_text("{}")
owner = engines.RolloutEngines(run_dir, on_death=print)
said = {}
try:
    first = manager(hosts=2)
    second, restart = owner.restart(first, precision=Precision(Scheme.BF16), after_sync=7, start=manager)
    said["ended"] = list(restart.ended) == first.pids[1] + first.pids[0]
    said["numbers"] = [restart.numbers()[each] for each in ("generation", "after_sync", "precision")]
    said["seconds"] = restart.seconds == restart.end_s + restart.start_s > 0
    kept = read_generation(run_dir)
    said["kept"] = [kept.number, kept.after_sync, kept.precision.text]
    said["aside"] = sorted(str(path.relative_to(run_dir)) for path in run_dir.glob("attest/*/*"))
    said["failed start"] = restarted(second, lambda: ray.get(fails.remote(ValueError("no port"))))
    said["own error"] = restarted(manager(), lambda: ray.get(fails.remote(SyncError("not these"))))
    dead = manager()
    kill(dead.servers[0])
    said["dead server"] = restarted(dead)
    ray.kill(dead.servers[0])  # else this process may refuse its name: it remembers names until it hears of the death
    stays = manager(ends=False)
    engines.GONE_WITHIN_S = 1.0
    alone, _ = owner.restart(stays, precision=Precision(), after_sync=10, start=manager)
    said["engine that stays"] = [each.returncode for each in idle if each.pid == stays.pids[0][1] and each.wait()]
    kill(workers[0])
    said["dead worker"] = restarted(alone).split(":")[0]
finally:
    for each in idle:
        each.kill()
os.write(1, json.dumps(said).encode() + b"\\n")
ray.shutdown()
"""


@pytest.mark.slow
def test_engines_end_and_others_take_their_names(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert json.loads(line) == {
        "ended": True,
        "numbers": [2, 7, "bf16"],
        "seconds": True,
        "kept": [2, 7, "bf16"],
        "aside": ["attest/generation-1/rollout-0-0.json"],
        "failed start": "EngineError: the new rollout engines did not start: ValueError: no port",
        "own error": "SyncError: not these",
        "dead server": "EngineError: a rollout server died before it was to end",
        "engine that stays": [-signal.SIGKILL],
        "dead worker": "ProcessDied",
    }


@pytest.mark.parametrize(
    ("servers", "workers", "beside"),
    [("a", "0", [("a", "0")]), ("a", "01", [("a", "0")]), ("ab", "01234567", [("a", "0"), ("b", "4")])],
)
def test_each_server_has_a_worker_on_its_own_host(servers: str, workers: str, beside: list[tuple[str, str]]) -> None:
    assert _beside(SimpleNamespace(servers=list(servers), workers=list(workers))) == beside


def asked_of(workers: str, answers: dict[str, list[object]]) -> list[SimpleNamespace]:
    """Stand for Ray's handles: what a worker is asked to run is kept."""
    return [
        SimpleNamespace(
            __ray_call__=SimpleNamespace(remote=lambda run, name=name: answers.setdefault(name, []).append(run))
        )
        for name in workers
    ]


def test_every_worker_lets_go_of_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One server and several ranks, a GPU each."""
    calls_by_worker: dict[str, list[object]] = {}
    monkeypatch.setattr(engines.ray, "get", lambda refs, timeout: refs)
    replicas = [
        SimpleNamespace(servers=["server"], workers=asked_of(names, calls_by_worker)) for names in ("abcd", "efgh")
    ]
    _free_memory(replicas)
    assert calls_by_worker == {name: [_empty_cache] for name in "abcdefgh"}


class Watch:
    """In place of EngineWatch, which asks servers."""

    def __init__(self, servers: list[str], done: list[object]) -> None:
        self._servers, self._done = servers, done
        done.append(("watched", *servers))

    def stop(self) -> None:
        self._done.append(("left", *self._servers))


def test_memory_is_free_and_the_new_precision_known_when_engines_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    monkeypatch.setattr(engines, "_end", lambda replicas: done.append(("ended", *replicas)) or (7,))
    monkeypatch.setattr(engines, "_free_memory", lambda replicas: done.append(("freed", *replicas)))
    monkeypatch.setattr(engines, "EngineWatch", lambda servers, on_death: Watch(servers, done))
    owner = engines.RolloutEngines(tmp_path, on_death=lambda error: None)
    owner.watch(["old server"])
    old, fresh = SimpleNamespace(get_replicas=lambda: ["replica"]), SimpleNamespace(server_handles=["new server"])
    new, restart = owner.restart(
        old, precision=BF16, after_sync=3, start=lambda: done.append(read_generation(tmp_path)) or fresh
    )
    assert done == [
        ("watched", "old server"),
        ("left", "old server"),
        ("ended", "replica"),
        ("freed", "replica"),
        Generation(BF16, firsts=(1, 4)),
        ("watched", "new server"),
    ]
    assert (new, restart.ended, restart.generation) == (fresh, (7,), owner.generation)
    assert owner.take_restart() == {"engine_restart_s": round(restart.seconds, 4)}
    assert owner.take_restart() == {}


def test_a_worker_that_does_not_answer_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(refs: list[object], timeout: float) -> None:
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(engines.ray, "get", get)
    with pytest.raises(EngineError) as raised:
        _free_memory([SimpleNamespace(workers=asked_of("a", {}))])
    assert raised.value.message == "the trainer's workers did not answer within 60 s, between engines"


@pytest.fixture
def idle() -> Iterator[Callable[[], subprocess.Popen]]:
    with contextlib.ExitStack() as ends:

        def start() -> subprocess.Popen:
            process = subprocess.Popen(["sleep", "600"])
            ends.callback(process.kill)
            return process

        yield start


def test_what_is_left_is_killed_after_a_while(idle: Callable[[], subprocess.Popen]) -> None:
    ended, late = idle(), idle()
    ended.kill()
    ended.wait()
    assert _left_over(None, (ended.pid, late.pid), 0.1) == []
    assert late.wait(timeout=10) == -signal.SIGKILL


def test_what_survives_that_is_told(idle: Callable[[], subprocess.Popen], monkeypatch: pytest.MonkeyPatch) -> None:
    process = idle()
    monkeypatch.setattr(engines, "KILLED_WITHIN_S", 0.1)
    monkeypatch.setattr(psutil.Process, "kill", lambda self: None)  # such as one that waits for a driver
    assert _left_over(None, (process.pid,), 0.1) == [process.pid]


class OfRay(ray.exceptions.RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__(f"somewhere\n{type(cause).__name__}: {cause}")
        self.cause = cause


@pytest.mark.parametrize(
    ("raised", "error_type", "message"),
    [
        (ValueError("no port"), EngineError, "the new rollout engines did not start: no port"),
        (AssertionError(), EngineError, "the new rollout engines did not start: no message"),
        (OfRay(OSError("no room")), EngineError, "the new rollout engines did not start: OSError: no room"),
        (OfRay(SyncError("not these")), SyncError, "not these"),
        (SyncError("nor these"), SyncError, "nor these"),
    ],
)
def test_whatever_keeps_new_engines_from_starting_has_a_name(
    raised: Exception, error_type: type[ApplianceError], message: str
) -> None:
    def start() -> None:
        raise raised

    with pytest.raises(ApplianceError) as found:
        _started(start)
    assert (type(found.value), found.value.message) == (error_type, message)

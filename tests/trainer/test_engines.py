"""How rollout engines are ended and others take their place; whatever fails on the way has a name and an end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from appliance.trainer.engines import _beside

# Replicas as verl has them: a server per host, with a name, and workers beside it. An engine is a process that the
# driver started, so that nothing but its server's word ends it.
DRIVER = """
import json, os, signal, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
import ray
from appliance.errors import SyncError
from appliance.quant.precision import Precision
from appliance.quant.scheme import Scheme
from appliance.run.generation import read_generation
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
    return SimpleNamespace(get_replicas=lambda: [replica], servers=servers, pids=pids)

def restarted(old, start=manager):
    try:
        return owner.restart(old, precision=Precision(), after_sync=9, start=start)
    except Exception as error:
        named = translate(error) if isinstance(error, ray.exceptions.RayError) else error
        return f"{type(named).__name__}: {named.message}"

(run_dir / "attest").mkdir()
(run_dir / "attest" / "rollout-0-0.json").write_text("{}")
owner = engines.RolloutEngines(run_dir)
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
    text = f"EngineError: the rollout engines did not end: processes {stays.pids[0][1]} are still there"
    said["engine that stays"] = restarted(stays) == text
    alone = manager()
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
        "engine that stays": True,
        "dead worker": "ProcessDied",
    }


@pytest.mark.parametrize(
    ("servers", "workers", "beside"),
    [("a", "0", [("a", "0")]), ("a", "01", [("a", "0")]), ("ab", "01234567", [("a", "0"), ("b", "4")])],
)
def test_each_server_has_a_worker_on_its_own_host(servers: str, workers: str, beside: list[tuple[str, str]]) -> None:
    assert _beside(SimpleNamespace(servers=list(servers), workers=list(workers))) == beside

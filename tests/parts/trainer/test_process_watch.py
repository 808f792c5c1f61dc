"""Deaths that the trainer would notice late or never: of a worker that nobody calls, and of Ray's own processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from appliance.errors import EngineError, ProcessDied
from appliance.trainer.process_watch import describe_exit, error_of_death

CRASH = (
    'actor_died_error_context {\n  error_message: "The actor is dead because its worker process has died. SYSTEM_ERROR'
)


def actor(name: str, *, state: str = "DEAD", cause: str | None = CRASH) -> dict[str, object]:
    return {"ActorClassName": name, "State": state, "Pid": 4711, "DeathCause": cause}


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("WorkerDict", ProcessDied, "a training worker died: WorkerDict, process 4711"),
        ("GroupServer", EngineError, "a rollout server died: GroupServer, process 4711"),
        ("SimpleStorageUnit", ProcessDied, "a storage unit of the TransferQueue died: SimpleStorageUnit, process 4711"),
        ("make.<locals>.WorkerDict", ProcessDied, "a training worker died: WorkerDict, process 4711"),
        ("Other", ProcessDied, "a worker died: Other, process 4711"),
    ],
)
def test_who_died(name: str, kind: type, message: str) -> None:
    error = error_of_death(actor(name))
    assert type(error) is kind
    assert error.message == message


def test_the_living_are_no_news() -> None:
    assert error_of_death(actor("WorkerDict", state="ALIVE", cause=None)) is None


@pytest.mark.parametrize(
    "cause",
    [
        'error_message: "The actor is dead because it was killed by `ray.kill`."',
        'error_message: "The actor is dead because all references to the actor were removed including lineage"',
    ],
)
def test_ended_on_purpose_is_no_news(cause: str) -> None:
    assert error_of_death(actor("WorkerDict", cause=cause)) is None


def test_how_a_process_ended() -> None:
    texts = [describe_exit(code) for code in (-9, 1, -64)]
    assert texts == ["signal 9 (SIGKILL)", "exit code 1", "signal 64 (SIGRTMAX)"]


# A driver, with three actors where one of them is the victim. What is killed on purpose comes first, and must not be
# told.
DRIVER = """
import os, signal, sys, threading, time
import ray
ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
from appliance.trainer.process_watch import NAMED_AFTER_S, ProcessWatch

@ray.remote
class WorkerDict:
    def pid(self):
        return os.getpid()

told = threading.Event()

def on_death(error):
    os.write(1, f"{type(error).__name__}: {error.message} {time.monotonic() - killed:.0f}\\n".encode())
    if sys.argv[1] == "actor":
        told.set()
    else:
        os._exit(0)

if sys.argv[1] == "actor":
    meant, dropped, needed = WorkerDict.remote(), WorkerDict.remote(), WorkerDict.remote()
    pids = ray.get([each.pid.remote() for each in (meant, dropped, needed)])
    watch = ProcessWatch(on_death=on_death, has_services=True)
    ray.kill(meant)
    del dropped
    time.sleep(NAMED_AFTER_S + 1)
    killed = time.monotonic()
    os.kill(pids[2], signal.SIGKILL)
    assert told.wait(60)
    os.write(1, f"pid {pids[2]}\\n".encode())
    ray.shutdown()
else:
    watch = ProcessWatch(on_death=on_death, has_services=True)
    node = ray._private.worker._global_node
    killed = time.monotonic()
    os.kill(node.all_processes[sys.argv[1]][0].process.pid, signal.SIGKILL)
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "message"),
    [
        ("actor", "ProcessDied: a training worker died: WorkerDict, process {pid}"),
        ("raylet", "ProcessDied: Ray's scheduler (raylet) died: signal 9 (SIGKILL)"),
        ("gcs_server", "ProcessDied: Ray's control service (GCS) died: signal 9 (SIGKILL)"),
    ],
)
def test_death_is_named_within_a_minute(victim: str, message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, victim], capture_output=True, text=True, timeout=240, check=False
    )
    told, *rest = [line for line in done.stdout.splitlines() if line.startswith(("ProcessDied", "pid "))]
    text, _, seconds = told.rpartition(" ")
    assert text == message.format(pid=rest[0].split()[1] if rest else "")
    assert int(seconds) < 60

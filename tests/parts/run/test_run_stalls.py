"""Children that stand still: noticed, asked what they are doing, cut, named."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from plans import make_guard

from appliance.errors import ApplianceError, EngineError, TrainingError
from appliance.launch.outcome import Child
from appliance.launch.train import Stage, StallWatch, ask_around, run_training
from appliance.record.liveness import HEARTBEAT_FILE, Heartbeat, dump_stacks, last_beat
from appliance.record.session import RunStatus, read_record
from appliance.terms.environment import LOG_DIR_VARIABLE

# Two processes: the second waits in native code, where no Python signal handler would run.
HANGING = """
import json, os, subprocess, sys, time
from pathlib import Path
from appliance.record.events import append_event
from appliance.record.liveness import keep_stacks
run_dir = Path(os.environ["APPLIANCE_PLAN"]).parent
keep_stacks("driver")
code = "from appliance.record.liveness import keep_stacks; keep_stacks('worker'); import threading\\n"
code += "def the_place_where_it_hangs():\\n  lock = threading.Lock(); lock.acquire(); lock.acquire()\\n"
code += "the_place_where_it_hangs()"
subprocess.Popen([sys.executable, "-c", code])
while not list((Path(os.environ["APPLIANCE_LOGS"]) / "stacks").glob("worker-*")):
    time.sleep(0.05)
append_event(run_dir, kind="phase", what="update")
(run_dir / "ready").write_text("1")
def waits_for_ever():
    time.sleep(1000)
waits_for_ever()
"""


def test_progress_is_news_or_a_heartbeat(tmp_path: Path) -> None:
    watch = StallWatch(stall_s=10.0, log_dir=tmp_path, now=0.0)
    assert not watch.is_stalled(news=False, now=9.9)
    assert watch.is_stalled(news=False, now=10.0)
    assert not watch.is_stalled(news=True, now=11.0)
    assert not watch.is_stalled(news=False, now=20.9)
    (tmp_path / HEARTBEAT_FILE).touch()
    assert not watch.is_stalled(news=False, now=30.0)
    assert not watch.is_stalled(news=False, now=39.9)
    assert watch.is_stalled(news=False, now=40.0)


def test_heartbeat_is_at_most_one_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_DIR_VARIABLE, str(tmp_path))
    heart = Heartbeat()
    assert last_beat(tmp_path) == 0.0
    heart.beat()
    os.utime(tmp_path / HEARTBEAT_FILE, (1.0, 1.0))
    heart.beat()
    assert last_beat(tmp_path) == 1.0
    time.sleep(1.1)
    heart.beat()
    assert last_beat(tmp_path) > 1.0


def test_outside_a_run_there_is_no_heart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LOG_DIR_VARIABLE, raising=False)
    Heartbeat().beat()


def test_process_that_keeps_no_stacks_is_never_signalled(tmp_path: Path) -> None:
    """SIGUSR2 would end it. A number in the folder that is not one of the run's is none of its processes."""
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        (tmp_path / "stacks").mkdir()
        (tmp_path / "stacks" / f"worker-{stranger.pid}.txt").touch()
        assert dump_stacks(tmp_path, living=set()) == []
        time.sleep(0.2)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize(
    ("phase", "kind"), [("rollout", EngineError), ("restart-engines", EngineError), ("update", TrainingError)]
)
def test_who_stood_still(phase: str, kind: type, tmp_path: Path) -> None:
    error = ask_around(tmp_path, log_dir=tmp_path / "logs", phase=phase, stall_s=90.0)
    assert type(error) is kind
    assert error.message == f"no progress for 1 min 30 s in phase {phase}: ended by the launcher"
    assert error.hint == "no process reported what it was doing: see the log"


def test_stalled_training_is_cut_and_says_where_it_hung(
    tmp_path: Path, small_plan: Callable, python: Callable, launch: Callable, processes_of: Callable
) -> None:
    plan = small_plan(tmp_path, argv=python(HANGING)).replace(guard=make_guard(stall_s=4.0))
    run_dir = Path(plan.run_dir)
    process = launch(plan)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 5, err
    assert err.splitlines()[-4:] == [
        "error: training failed in phase update: no progress for 4 s in phase update: ended by the launcher",
        "hint: what 2 processes were doing is in small-1/logs/1/stacks; if they are only slow, raise guard.stall_s",
        "log: small-1/logs/1/train.log",
        "next: appliance logs small-1",
    ]
    stacks = {path.name.split("-")[0]: path.read_text() for path in (run_dir / "logs" / "1" / "stacks").iterdir()}
    assert "in waits_for_ever" in stacks["driver"]
    assert "in the_place_where_it_hangs" in stacks["worker"]
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    (stall,) = [event for event in events if event["kind"] == "stall"]
    assert [name.split("-")[0] for name in stall["stacks"]] == ["driver", "worker"]
    record = read_record(run_dir)
    assert (record.state, record.exit_code) == (RunStatus.FAILED, 5)
    assert processes_of(run_dir) == []


def test_a_stall_on_a_full_disk_is_told_all_the_same(
    disk_of: Callable[[str], Path],
    small_plan: Callable,
    python: Callable,
    processes_of: Callable,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = disk_of("1m")
    plan = small_plan(disk, argv=python("import time; time.sleep(1000)")).replace(guard=make_guard(stall_s=2.0))

    def on_a_full_disk(*where: Path, **how: object) -> ApplianceError:
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(1 << 16))
        return ask_around(*where, **how)

    monkeypatch.setattr("appliance.launch.train.ask_around", on_a_full_disk)
    assert run_training(plan, recipe_yaml="name: small\n", findings=(), name="small", json_mode=True) == 5
    captured = capsys.readouterr()
    assert (
        "error: training failed in phase starting: no progress for 2 s in phase starting: ended by the launcher"
        in captured.err
    )
    assert f"error: {plan.run_dir}: no space left: run.json does not say how the run ended" in captured.err
    (failure,) = [each for each in map(json.loads, captured.out.splitlines()) if each.get("kind") == "failure"]
    assert (failure["error"], failure["exit_code"]) == ("TrainingError", 5)
    assert processes_of(Path(plan.run_dir)) == []


BEFORE_TRAINING = """
import os, time
from appliance.record.liveness import keep_stacks
keep_stacks("profile")
def waits_for_a_download():
    time.sleep(1000)
waits_for_a_download()
"""


def test_a_child_before_the_training_is_cut_too(
    tmp_path: Path,
    small_plan: Callable,
    python: Callable,
    processes_of: Callable,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = small_plan(tmp_path).replace(guard=make_guard(stall_s=4.0))
    run_dir = Path(plan.run_dir)
    child = Child("profile", "profiling", python(BEFORE_TRAINING), default_code=4)
    stage = Stage(child=lambda _: child, is_done=lambda _: False, finish=lambda _: None)
    started = time.monotonic()
    code = run_training(
        plan, recipe_yaml="name: small\n", findings=(), name="small", json_mode=False, stages=(stage,), quiet=True
    )
    assert time.monotonic() - started < 30
    assert code == 5
    err = capsys.readouterr().err.splitlines()
    assert (
        err[0]
        == "error: profiling failed in phase starting: no progress for 4 s in phase starting: ended by the launcher"
    )
    (stacks,) = (run_dir / "logs" / "1" / "stacks").iterdir()
    assert stacks.name.startswith("profile-") and "in waits_for_a_download" in stacks.read_text()
    assert read_record(run_dir).state is RunStatus.FAILED
    assert processes_of(run_dir) == []


def test_roles_follow_what_a_process_becomes(tmp_path: Path) -> None:
    """The name that says most counts, whenever a process imports verl, and a fork has a file of its own."""
    code = """
import os, sys
from appliance.record.liveness import keep_stacks
for roles in (["ray", "worker"], ["worker", "engine"], ["engine", "worker", "ray"], ["driver", "worker"]):
    if os.fork() == 0:
        for role in roles:
            keep_stacks(role)
        os._exit(0)
    os.wait()
"""
    environment = {**os.environ, LOG_DIR_VARIABLE: str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    names = sorted(path.name.split("-")[0] for path in (tmp_path / "stacks").iterdir())
    assert names == ["driver", "engine", "engine", "worker"]


def test_an_actor_that_loads_nothing_of_ours_has_the_name_that_ray_gives_it(tmp_path: Path) -> None:
    """Ray calls WORKER_HOOK in every worker. Its title is there when it is asked."""
    code = """
import pkgutil, time
from setproctitle import setproctitle
from appliance.record.liveness import WORKER_HOOK
module, _, function = WORKER_HOOK.rpartition(".")
pkgutil.resolve_name(f"{module}:{function}")()
setproctitle("ray::TransferQueueController.put_data")
def waits():
    print("ready", flush=True)
    time.sleep(1000)
waits()
"""
    environment = {**os.environ, LOG_DIR_VARIABLE: str(tmp_path)}
    actor = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    try:
        assert actor.stdout is not None and actor.stdout.readline() == b"ready\n"
        (file,) = dump_stacks(tmp_path, living={actor.pid})
        assert file.name == f"TransferQueueController-{actor.pid}.txt"
        assert "in waits" in file.read_text()
    finally:
        actor.kill()
        actor.wait()


def test_slow_training_with_a_heartbeat_is_left_alone(
    tmp_path: Path, small_plan: Callable, python: Callable, launch: Callable, wait_until: Callable
) -> None:
    beating = HANGING.replace(
        "    time.sleep(1000)\n",
        "    from appliance.record.liveness import Heartbeat\n    heart = Heartbeat()\n"
        "    while True:\n        heart.beat(); time.sleep(0.2)\n",
    )
    plan = small_plan(tmp_path, argv=python(beating)).replace(guard=make_guard(stall_s=4.0, save_budget_s=0.1))
    process = launch(plan)
    wait_until(lambda: (Path(plan.run_dir) / "ready").exists(), seconds=60)
    time.sleep(6.0)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130


def test_child_that_was_told_to_end_is_no_stall(
    tmp_path: Path, small_plan: Callable, python: Callable, launch: Callable, wait_until: Callable
) -> None:
    """Saving may take longer than a step, and the subreaper waits for what a child leaves behind."""
    slow_to_end = """
import os, signal, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(6), os._exit(1)))
(Path(os.environ["APPLIANCE_PLAN"]).parent / "ready").write_text("1")
time.sleep(1000)
"""
    plan = small_plan(tmp_path, argv=python(slow_to_end)).replace(guard=make_guard(stall_s=4.0, save_budget_s=0.1))
    process = launch(plan)
    wait_until(lambda: (Path(plan.run_dir) / "ready").exists(), seconds=60)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert '"stall"' not in (Path(plan.run_dir) / "events.jsonl").read_text()

"""Rows that end in every way, for the runner's tests. Their process imports this file by PYTHONPATH."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from appliance.record.liveness import keep_stacks
from benchmarks.accept.ground import Ground, RowSkipped


def well(ground: Ground, *, value: float) -> None:
    ground.figure("a figure", value, "GB/s")
    ground.hold(True, "")


def wrongly(ground: Ground) -> None:
    ground.hold(False, "the answer is 41")


def by_a_typo(ground: Ground) -> None:
    os.write(1, b"what a log says\n")
    ground.hould(True)


def unchecked(ground: Ground) -> None:
    ground.figure("a figure", 1)


def skipped(ground: Ground) -> None:
    raise RowSkipped("needs what is not there")


def by_a_fault(ground: Ground) -> None:
    ground.figure("before the fault", 7)
    os.kill(os.getpid(), signal.SIGSEGV)


def silently(ground: Ground) -> None:
    os._exit(0)


def in_parts(ground: Ground, *, names: list[str]) -> None:
    """The parts do what they are called."""

    def run_part(name: str) -> None:
        ground.figure(f"{name}, process", os.getpid())
        ground.hold(name != "wrong", "the answer is 41")
        if name == "lost":
            ground.has_device = lambda: False  # as after an illegal address
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if name == "faults":
            os.kill(os.getpid(), signal.SIGSEGV)
        if name == "hangs":
            time.sleep(600)
        if name == "vllm":
            without_a_package(ground, name="vllm")

    ground.run_parts(names, run_part)


def as_a_training(ground: Ground) -> None:
    """That hangs, with a process that would write its stacks, and one that would die of being asked."""
    run_dir = ground.folder / "runs" / "accept"
    (run_dir / "sync").mkdir(parents=True)
    (run_dir / "plan.json").write_text("{}")
    (run_dir / "metrics.jsonl").write_text("a step\n" * (1 << 19))
    (run_dir / "sync" / "rollout-0-0.jsonl").write_text("a sync\n")
    (run_dir / "model.safetensors").write_bytes(b"large")
    code = "from benchmarks.accept import child; child.keep_stacks('engine'); import time; print(1, flush=True)\n"
    listens = subprocess.Popen(
        [sys.executable, "-c", f"{code}def asleep(): time.sleep(600)\nasleep()"], stdout=subprocess.PIPE
    )
    listens.stdout.readline()
    subprocess.Popen(["sleep", "600"])
    keep_stacks("row")
    ground.hold(True, "")
    time.sleep(600)


def by_hanging(ground: Ground) -> None:
    """With a process that leaves its session, does not hear SIGTERM and takes a title, and with it loses its mark."""
    code = (
        "import setproctitle, signal, time; setproctitle.setproctitle('engine')\n"
        "signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
    child.stdout.readline()
    ground.figure("child", child.pid)
    time.sleep(600)


def without_a_package(ground: Ground, *, name: str) -> None:
    raise ModuleNotFoundError(f"No module named '{name}'", name=name)


def meets(ground: Ground, *, others: list[str]) -> None:
    """Holds if the rows of these names run while it does."""
    ground.hold(True, "")
    deadline = time.monotonic() + 60
    while not all((ground.folder.parent / name / "outcome.json").is_file() for name in others):
        if time.monotonic() > deadline:
            ground.hold(False, f"{others} did not come")
        time.sleep(0.05)

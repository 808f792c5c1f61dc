"""A process of a node with fewer cores than the head takes fewer threads than the plan says, and so does its engine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from appliance.trainer import worker

TRY = """
import os, subprocess, sys
os.sched_setaffinity(0, {cores})
import appliance.trainer.worker, torch
said = "import torch; print(torch.get_num_threads())"
engine = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True).stdout.strip()
print("threads", torch.get_num_threads(), engine)
"""


@pytest.mark.slow
def test_a_worker_takes_no_more_threads_than_its_host_has_cores() -> None:
    """As Ray starts it: verl imports our module, and the engine is a child of that process."""
    one_core = {min(os.sched_getaffinity(0))}
    environment = os.environ | {"OMP_NUM_THREADS": "2", "VERL_PLATFORM": "cpu"}
    environment.pop("APPLIANCE_PLAN", None)
    command = [sys.executable, "-c", TRY.format(cores=one_core)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    assert "threads 1 1\n" in child.stdout


def test_a_host_with_more_cores_than_threads_takes_the_plans_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in model has one thread on any host."""
    monkeypatch.setattr(worker, "usable_cores", lambda: 64)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    worker.fit_threads_to_host()
    assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (before, "1")

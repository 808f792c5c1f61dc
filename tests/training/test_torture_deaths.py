"""Every kind of process of a real training, killed or stopped: named within a minute. `make torture`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from killable import Run

from appliance.trainer import forks

pytestmark = pytest.mark.torture

NAMED_WITHIN_S = 60.0
STALL_S, STALLED = 60, "no progress for 1 min 0 s in phase "  # a model has taken 30 s to load on a busy host
# The process's name as the kernel keeps it (15 characters), or a word of its command; who it is in the message; the
# exit code. Of the reward process: test_torture_rewards.py.
DEATHS = {
    "VLLM::EngineCor": ("rollout engine 0 died: its core process is gone", 4),
    "ray::GroupServe": ("rollout", 4),  # the engine watch or Ray's table, whichever looks first
    "ray::WorkerDict": ("worker died: ", 5),  # the watch says it, or the call that waits for it
    "ray::SimpleStor": ("a storage unit of the TransferQueue died", 5),
    "ray::TransferQu": ("the TransferQueue's controller died", 5),
    "raylet": ("Ray's scheduler (raylet) died: signal 9 (SIGKILL)", 5),
    "gcs_server": ("Ray's control service (GCS) died: signal 9 (SIGKILL)", 5),
    "appliance.trainer.entry": ("ended by signal 9 (SIGKILL)", 5),  # the trainer: the launcher says so
}


def after_a_step(new_run: Callable[..., Run], name: str, **sets: str) -> Run:
    run = new_run(name, trainer__steps="200", trainer__max_restarts="0", checkpoint__every_steps="0", **sets)
    run.start()
    assert run.wait_for(lambda: run.steps), run.log_text[-3000:]
    return run


@pytest.mark.parametrize("victim", DEATHS)
def test_death_is_named_within_a_minute(victim: str, new_run: Callable[..., Run]) -> None:
    words, code = DEATHS[victim]
    run = after_a_step(new_run, f"death-{victim.replace(':', '')}")
    killed_at = time.time()
    run.kill(victim)
    assert run.end() == code, run.log_text[-3000:]
    failure = run.events("failure")[0]
    assert words in failure["what"]
    assert failure["time"] - killed_at < NAMED_WITHIN_S
    assert run.processes() == []


def test_nobody_misses_the_server_of_forks(new_run: Callable[..., Run]) -> None:
    run = new_run("forks", trainer__steps="4", checkpoint__every_steps="0")
    run.start()
    assert run.wait_for(lambda: run.steps), run.log_text[-3000:]
    run.kill(forks.NAME)
    assert run.end() == 0, run.log_text[-3000:]
    assert run.events("failure") == []


@pytest.mark.parametrize("victim", ["VLLM::EngineCor", "ray::WorkerDict"])
def test_process_that_stands_still_is_cut_with_stacks_of_the_others(victim: str, new_run: Callable[..., Run]) -> None:
    """SIGSTOP: it is there, holds its connections and does nothing."""
    run = after_a_step(new_run, f"stall-{victim.replace(':', '')}", guard__stall_s=str(STALL_S))
    (process,) = [each for each in run.processes() if each.name.startswith(victim)]
    os.kill(process.pid, signal.SIGSTOP)
    code = run.end()
    assert code in (4, 5), run.log_text[-3000:]
    failure = run.events("failure")[0]
    assert failure["what"].startswith(STALLED) or "did not answer" in failure["what"]
    if failure["what"].startswith("no progress"):
        (stall,) = run.events("stall")
        other = "WorkerDict" if victim.startswith("VLLM") else "engine"  # the rollout server's process is one too
        roles = {name.split("-")[0] for name in stall["stacks"]}
        assert roles >= {"driver", "reward", "TransferQueueController", "SimpleStorageUnit", other}
    assert run.processes() == []

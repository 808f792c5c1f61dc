"""Rewards that fail in a real training: each costs its one sample, too many end the run. `make torture`."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from killable import NAMED_WITHIN_S, Run, with_layer

from appliance.record.checkpoints import checkpoint_folder, damage
from appliance.trainer.rewards import IDLE_DEATH

pytestmark = pytest.mark.torture

TIMEOUT_S = 10
REWARD_PROCESS = "--multiprocessing-fork"  # the pool's way to start one
# What goes wrong with one response, and how the step tells it.
FAULTS = {"raise": "raised", "nan": "not a grade", "hang": "timed out", "die": "died"}


def failed(run: Run) -> int:
    return sum(line["reward_failures"] for line in run.lines("metrics.jsonl"))


def kill_reward_process(run: Run) -> None:
    """The one that is a child of the trainer: an engine's core has such a command too, until it has its title."""
    trainer = run.by_command("appliance.trainer.entry")[0]
    process = next(each for each in run.by_command(REWARD_PROCESS) if each.parent == trainer.pid)
    os.kill(process.pid, signal.SIGKILL)


def test_rewards_that_fail_cost_their_sample_until_they_are_too_many(
    new_run: Callable[..., Run], tmp_path: Path
) -> None:
    """The reward process is killed while it waits, a reward raises, is NaN, hangs, its process is killed; then all
    raise."""
    run = new_run(
        "rewards",
        trainer__steps="1000",
        trainer__max_restarts="0",
        checkpoint__every_steps="0",
        task__reward_timeout_s=str(TIMEOUT_S),
    )
    run.env = {
        "REWARDS_THAT_FAIL": str(tmp_path),
        "PYTHONPATH": with_layer("rewards_that_fail"),
    }
    run.start()
    assert run.wait_for(lambda: run.steps), run.log_text[-3000:]
    kill_reward_process(run)
    killed_at = time.time()
    steps = len(run.steps)
    assert run.wait_for(lambda: len(run.steps) > steps + 1), run.log_text[-3000:]
    lost = failed(run)
    told = [event["time"] - killed_at for event in run.events("note") if event["what"] == IDLE_DEATH]
    assert lost + len(told) == 1 and max(told, default=0.0) < NAMED_WITHIN_S  # lost where it was not waiting after all
    for fault_name, fault in FAULTS.items():
        before = len(run.events("reward"))
        (tmp_path / fault_name).touch()
        if fault_name == "die":
            assert run.wait_for((tmp_path / "pid").exists), run.log_text[-3000:]
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        lost += 1
        assert run.wait_for(lambda lost=lost: failed(run) == lost), run.log_text[-3000:]
        (event,) = run.events("reward")[before:]
        assert re.fullmatch(rf"1 of 64 rewards of step \d+ failed \(1 {fault}\)", event["what"])
    (tmp_path / "all").touch()
    assert run.end() == 6, run.log_text[-3000:]
    step = run.steps[-1]
    assert run.steps == list(range(1, step + 1))  # the step whose rewards failed is not among them
    assert damage(checkpoint_folder(run.run_dir, step=step)) == []
    record = run.record()
    assert (record["state"], record["exit_code"], record["attempt"]) == ("stopped", 6, 1)
    assert re.fullmatch(rf"\d+ of 64 rewards of step {step + 1} failed \(\d+ raised\), more than 10%", record["reason"])
    assert run.processes() == []

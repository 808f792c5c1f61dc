"""A real training that is killed in its saves, at chosen operations of verl's rank and of the driver: `make torture`.

Every operation of a save is tried in seconds by test_save_kill_points.py, with ranks of a few bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from killable import NAMED_WITHIN_S, Run, check_undisturbed, with_layer

from appliance.record.checkpoints import checkpoint_folder, damage, find_newest, half_done, in_order

pytestmark = pytest.mark.torture

ACTOR = "partial-global_step_N/actor"
OLD, NEW = "older", "newer"
# Where it is killed, in the order of a save: (operation, the newest whole checkpoint afterwards, whether something is
# half written or half deleted). Half of what is written, by torch.save too, is on the disk then.
POINTS = [
    ("driver os.mkdir partial-global_step_N", OLD, False),
    (f"rank torch.save {ACTOR}/model_world_size_1_rank_0.pt", OLD, True),
    (f"rank torch.save {ACTOR}/optim_world_size_1_rank_0.pt", OLD, True),
    (f"rank create {ACTOR}/fsdp_config.json", OLD, True),
    ("driver write partial-global_step_N/data.pt", OLD, True),
    ("driver write partial-global_step_N/profile/profile.safetensors", OLD, True),
    (f"driver fsync {ACTOR}/optim_world_size_1_rank_0.pt", OLD, True),
    ("driver write partial-global_step_N/.manifest.json", OLD, True),
    ("driver os.rename partial-global_step_N/.manifest.json", OLD, True),
    ("driver os.rename partial-global_step_N", OLD, True),
    ("driver read global_step_N/actor/model_world_size_1_rank_0.pt", NEW, False),
    ("driver os.rename global_step_N", NEW, False),
    ("driver os.remove deleting-global_step_N/manifest.json", NEW, True),
]
# How it is named: (why, how what happened begins). A rank's death is heard by the save itself, or by the watch before.
NAMED = {
    "driver": ("", ("ended by signal 9 (SIGKILL)",)),
    "rank": ("ProcessDied", ("a worker died: ", "a training worker died: WorkerDict, process ")),
}
STEPS = 1 + sum(newest == NEW for _, newest, _ in POINTS) + 2  # the first, those that are saved all the same, and more


@dataclass(frozen=True)
class Layer:
    """folder: what `killed_in_a_save/sitecustomize.py` and the test tell each other through."""

    folder: Path

    def env(self, run: Run) -> dict[str, str]:
        return {
            "KILLED_IN_A_SAVE": str(self.folder),
            "KILLED_IN_A_SAVE_OF": str(run.run_dir / "checkpoints"),
            "PYTHONPATH": with_layer("killed_in_a_save"),
        }

    def choose(self, point: str) -> None:
        (self.folder / "taken").unlink(missing_ok=True)
        (self.folder / "chosen").write_text(point)
        (self.folder / "chosen").rename(self.folder / "at")

    @property
    def is_taken(self) -> bool:
        return (self.folder / "taken").exists()

    def passed(self) -> list[str]:
        return (self.folder / "passed").read_text().splitlines()


def test_a_training_that_is_killed_in_each_phase_of_a_save(
    new_run: Callable[..., Run], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """What is there then is whole, the run goes on from it, and ends with the steps of a run that nobody killed."""
    sets = {"trainer__steps": str(STEPS), "trainer__max_restarts": "0", "checkpoint__keep": "1"}
    layer = Layer(tmp_path)
    calm, run = new_run("calm-saves", **sets), new_run("killed-saves", **sets)
    calm.env, run.env = layer.env(calm), layer.env(run)
    calm.start()
    assert calm.end() == 0, calm.log_text[-3000:]
    passed = layer.passed()
    assert {point for point, _, _ in POINTS} <= set(passed), sorted(set(passed))
    run.start()
    assert run.wait_for(lambda: run.events("checkpoint")), run.log_text[-3000:]
    slowest_s, before = 0.0, 1
    for number, (point, newest, is_half_done) in enumerate(POINTS, start=1):
        layer.choose(point)
        if number > 1:
            run.start()
        assert run.end() == 5 and layer.is_taken, (point, run.log_text[-3000:])
        failures = run.events("failure")
        error, begins = NAMED[point.split()[0]]
        assert len(failures) == number, (point, failures)
        assert failures[-1].get("error", "") == error and failures[-1]["what"].startswith(begins), (point, failures[-1])
        slowest_s = max(slowest_s, failures[-1]["time"] - (tmp_path / "taken").stat().st_ctime)
        step = run.steps[-1]  # the one that was being saved
        assert number == 1 or step == before + 1, point
        before = step if newest == NEW else step - 1
        whole = checkpoint_folder(run.run_dir, step=before)
        assert find_newest(run.run_dir).newest == whole, (point, find_newest(run.run_dir))
        assert [damage(folder) for folder in in_order(run.run_dir)] == [[]] * len(in_order(run.run_dir)), point
        assert bool(half_done(run.run_dir)) == is_half_done, (point, half_done(run.run_dir))
        assert run.processes() == [], point
    assert slowest_s < NAMED_WITHIN_S
    run.start()
    assert run.end() == 0, run.log_text[-3000:]
    check_undisturbed(run, calm, steps=STEPS)
    by_rank = sum(point.startswith("rank") for point, _, _ in POINTS)
    saves = len(calm.steps)
    with capsys.disabled():
        summary = (
            f"\nsaves: killed {len(POINTS)} times in them, {by_rank} of them in verl's rank; named after at most "
            f"{slowest_s:.0f} s; {saves} steps, each once and as without a kill\n"
            f"  a save of this run came to {len(passed) // saves} operations, {len(set(passed))} kinds\n"
        )
        os.write(1, summary.encode())


def test_a_rank_that_dies_in_a_save_while_the_other_waits_for_it(new_run: Callable[..., Run], tmp_path: Path) -> None:
    """The one that is alive fails too, and is heard of as well: the launcher starts the run again."""
    run = new_run("two-ranks-saves", trainer__steps="3", trainer__max_restarts="1", cluster__gpus_per_node="2")
    layer = Layer(tmp_path)
    run.env = layer.env(run)
    run.start()
    assert run.wait_for(lambda: run.events("checkpoint")), run.log_text[-3000:]
    layer.choose(f"rank torch.save {ACTOR}/optim_world_size_2_rank_1.pt")
    assert run.end() == 0 and layer.is_taken, run.log_text[-3000:]
    (failure,) = run.events("failure")
    error, begins = NAMED["rank"]
    assert failure.get("error", "") == error and failure["what"].startswith(begins), failure
    assert len(run.events("restart")) == 1 and run.record()["attempt"] == 2
    assert run.steps == [1, 2, 3]
    assert run.damaged_files() == [] and run.processes() == []

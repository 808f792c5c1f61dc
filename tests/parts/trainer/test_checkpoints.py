"""When a step is saved, what goes into a checkpoint, and what a disk that fills up leaves."""

from __future__ import annotations

import errno
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import plans
import pytest
import torch
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError, RayTaskError
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_sampler

from appliance.errors import CheckpointError, TrainingError, is_restartable
from appliance.record.checkpoints import checkpoint_folder, damage, find_newest, read_manifest
from appliance.record.plan import UaqPlan
from appliance.settings.sections import Checkpoint
from appliance.terms.schemes import AS_PLANNED, Scheme
from appliance.trainer import checkpoints
from appliance.trainer.checkpoints import (
    ASK_FILE,
    Checkpoints,
    at_its_place,
    read_state,
    restore_random,
    take_random,
    why_save,
)
from appliance.trainer.entry import translate
from appliance.trainer.metrics import append_metrics
from appliance.trainer.precision import PrecisionState
from appliance.trainer.process_watch import NAMED_AFTER_S

INT8 = PrecisionState("int8", AS_PLANNED, AS_PLANNED, Scheme.INT8, 0.0)
NEVER = {"step": 7, "is_last": False, "is_best": False, "is_asked": False, "since_save_s": 0.0}


@pytest.mark.parametrize(
    ("plan", "now", "reason"),
    [
        (plans.make_checkpoint(), {}, ""),
        (plans.make_checkpoint(), {"is_last": True}, "the end"),
        (plans.make_checkpoint(), {"is_asked": True}, "asked for by the file `save`"),
        (plans.make_checkpoint(), {"is_best": True}, ""),
        (plans.make_checkpoint(keep_best=True), {"is_best": True}, "the best validation so far"),
        (plans.make_checkpoint(every_steps=7), {}, "every 7 steps"),
        (plans.make_checkpoint(every_steps=2), {}, ""),
        (plans.make_checkpoint(every_minutes=0.5), {"since_save_s": 29.9}, ""),
        (plans.make_checkpoint(every_minutes=0.5), {"since_save_s": 30.0}, "every 0.5 minutes"),
    ],
)
def test_why_a_step_is_saved(plan: Checkpoint, now: dict[str, Any], reason: str) -> None:
    assert why_save(plan, **{**NEVER, **now}) == reason


class Saves:
    """A run's folder, with ranks that write a few bytes; `full` makes them fail as torch does on a full disk."""

    def __init__(self, run_dir: Path, uaq: UaqPlan | None = None, **checkpoint: Any) -> None:
        run_dir.mkdir(exist_ok=True)
        (run_dir / "metrics.jsonl").touch()
        self.run_dir = run_dir
        self.position = 0
        self.rank_bytes = 1000
        plan = plans.make_plan(run_dir).replace(uaq=uaq, checkpoint=plans.make_checkpoint(**checkpoint))
        self.checkpoints = Checkpoints(plan, save_workers=self._save, data_state=lambda: {"position": self.position})

    def _save(self, folder: Path, step: int) -> None:
        (folder / "actor").mkdir()
        (folder / "actor" / "model_world_size_1_rank_0.pt").write_bytes(os.urandom(self.rank_bytes))

    def step(self, step: int, *, val_reward: float | None = None, is_last: bool = False) -> None:
        self.position = step
        rated = {} if val_reward is None else {"val_reward_mean": val_reward}
        line = append_metrics(self.run_dir, {"step": step, "time_s": 1.0, **rated})
        (self.run_dir / "guard.json").write_text(json.dumps({"step": step}))
        self.checkpoints.end_step(line, precision=INT8, is_last=is_last)

    @property
    def names(self) -> list[str]:
        return sorted(each.name for each in (self.run_dir / "checkpoints").iterdir())


def test_a_checkpoint_has_everything_of_its_step(tmp_path: Path) -> None:
    saves = Saves(tmp_path / "run", every_steps=2)
    saves.step(1)
    saves.step(2, val_reward=0.25)
    folder = checkpoint_folder(saves.run_dir, step=2)
    manifest = read_manifest(folder)
    assert [file.path for file in manifest.files] == [
        "actor/model_world_size_1_rank_0.pt",
        "data.pt",
        "guard.json",
        "state.json",
    ]
    facts = manifest.facts
    assert (facts.step, facts.world_size, facts.reason, facts.val_reward) == (2, 1, "every 2 steps", 0.25)
    assert torch.load(folder / "data.pt", weights_only=True) == {"position": 2}
    assert json.loads((folder / "guard.json").read_text()) == {"step": 2}
    state = json.loads((folder / "state.json").read_text())
    assert state.keys() == {"step", "random", "line", "precision", "kv_ranges", "schema_version"}
    assert (state["step"], state["line"]) == (2, {"step": 2, "time_s": 1.0, "val_reward_mean": 0.25})
    assert state["kv_ranges"] is None
    events = [json.loads(line) for line in (saves.run_dir / "events.jsonl").read_text().splitlines()]
    assert [(event["kind"], event["what"]) for event in events] == [
        ("phase", "save"),
        ("checkpoint", "step 2 is saved"),
    ]


def test_a_checkpoint_has_the_ranges_of_keys_and_values_bit_for_bit(tmp_path: Path) -> None:
    """As a run with a KV cache in FP8 gives them."""
    saves, ranges = Saves(tmp_path / "run", every_steps=1), {"a": (1 / 3, 2.0**-40), "b": (448.0, 0.1)}
    saves.checkpoints.end_step({"step": 1}, precision=INT8, kv_ranges=ranges, is_last=False)
    assert read_state(checkpoint_folder(saves.run_dir, step=1)).kv_ranges == ranges


def test_a_checkpoint_has_the_scales_and_the_fits_that_its_run_goes_on_with(tmp_path: Path) -> None:
    """The fits as they were at the end of the step; nothing that only names paths."""
    saves = Saves(tmp_path / "run", uaq=UaqPlan(scale=1.5, folder=str(tmp_path / "run" / "scaled")))
    (saves.run_dir / "profile").mkdir()
    (saves.run_dir / "profile" / "profile.safetensors").write_bytes(b"scales")
    (saves.run_dir / "profile" / "quantization.yaml").write_text("profile: /here")
    (saves.run_dir / "scaled").mkdir()
    (saves.run_dir / "scaled" / "uaq.json").write_text('{"scale": 1.5}')
    (saves.run_dir / "clipping.jsonl").write_text('{"step": 1}\n')
    saves.step(1)
    (saves.run_dir / "clipping.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    folder = saves.checkpoints.save_now("a signal")
    assert folder is not None and damage(folder) == []
    assert [file.path for file in read_manifest(folder).files] == [
        "actor/model_world_size_1_rank_0.pt",
        *("clipping.jsonl", "data.pt", "guard.json", "profile/profile.safetensors", "state.json", "uaq.json"),
    ]
    assert (folder / "clipping.jsonl").read_text() == '{"step": 1}\n'
    assert (folder / "profile" / "profile.safetensors").read_bytes() == b"scales"
    assert (folder / "uaq.json").read_text() == '{"scale": 1.5}'


def test_in_the_next_rollout_the_last_step_is_saved_and_not_what_moved_since(tmp_path: Path) -> None:
    saves = Saves(tmp_path / "run")
    saves.step(1)
    saves.position = 99  # the next step's prompts were fetched
    (saves.run_dir / "guard.json").write_text("later")
    folder = saves.checkpoints.save_now("SIGTERM")
    assert folder == checkpoint_folder(saves.run_dir, step=1)
    assert torch.load(folder / "data.pt", weights_only=True) == {"position": 1}
    assert json.loads((folder / "guard.json").read_text()) == {"step": 1}
    assert saves.checkpoints.save_now("again") == folder and saves.names == ["global_step_1"]


def test_while_the_weights_move_there_is_nothing_to_save(tmp_path: Path) -> None:
    saves = Saves(tmp_path / "run")
    assert saves.checkpoints.save_now("SIGTERM") is None
    saves.step(1)
    saves.checkpoints.begin_update()
    assert saves.checkpoints.save_now("SIGTERM") is None
    assert not (saves.run_dir / "checkpoints").exists()


def test_a_touched_file_asks_once(tmp_path: Path) -> None:
    saves = Saves(tmp_path / "run")
    saves.step(1)
    (saves.run_dir / ASK_FILE).touch()
    saves.step(2)
    saves.step(3)
    assert saves.names == ["global_step_2"] and not (saves.run_dir / ASK_FILE).exists()


def test_minutes_count_from_the_last_save_whatever_it_was_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: now_s, time=time.time))
    saves = Saves(tmp_path / "run", every_minutes=1, keep=None)
    for step, seconds in enumerate((59, 61, 100, 130, 161), start=1):
        now_s = 1000.0 + seconds
        if step == 3:
            (saves.run_dir / ASK_FILE).touch()
        saves.step(step)
    assert saves.names == ["global_step_2", "global_step_3", "global_step_5"]


def test_the_best_and_the_newest_stay(tmp_path: Path) -> None:
    saves = Saves(tmp_path / "run", every_steps=1, keep=1, keep_best=True)
    for step, reward in enumerate((0.1, 0.9, 0.5, None, 0.4), start=1):
        saves.step(step, val_reward=reward)
    assert saves.names == ["global_step_2", "global_step_5"]


def test_another_attempt_knows_the_best_so_far(tmp_path: Path) -> None:
    Saves(tmp_path / "run", keep_best=True).step(1, val_reward=0.9)
    saves = Saves(tmp_path / "run", keep_best=True, keep=1)
    saves.step(2, val_reward=0.5)
    saves.step(3, val_reward=0.95)
    assert saves.names == ["global_step_3"]


def test_an_older_one_is_deleted_only_when_the_newer_was_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = Saves(tmp_path / "run", every_steps=1, keep=1)
    saves.step(1)
    read_back: list[str] = []

    def torn(folder: Path) -> list[str]:
        """A disk that gives back something else than it took; the older one is still there to be seen."""
        read_back.append(folder.name)
        assert saves.names == ["global_step_1", "global_step_2"]
        return ["data.pt has other content than was saved"]

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "damage", torn)
        with pytest.raises(CheckpointError) as caught:
            saves.step(2)
    assert read_back == ["global_step_2"]
    assert caught.value.message == (
        "checkpoint global_step_2 could not be written: OSError: [Errno 5] what was written reads back otherwise: "
        "data.pt has other content than was saved"
    )
    assert caught.value.hint == "then resume with --resume auto: global_step_1 is whole"
    assert damage(checkpoint_folder(saves.run_dir, step=1)) == []
    (checkpoint_folder(saves.run_dir, step=2) / "data.pt").write_bytes(b"what the disk gave back")
    found = find_newest(saves.run_dir)
    assert found.newest == checkpoint_folder(saves.run_dir, step=1)
    assert [each.folder.name for each in found.rejected] == ["global_step_2"]
    saves.step(3)
    assert "global_step_3" in saves.names and "global_step_1" not in saves.names


@pytest.mark.parametrize("death", [ActorDiedError(), OutOfMemoryError("of Ray's memory monitor")], ids=repr)
def test_a_worker_that_dies_in_a_save_is_no_fault_of_the_disk(tmp_path: Path, death: RayError) -> None:
    """The run ends as with any worker that dies, and is started again; a checkpoint that cannot be written is not."""
    saves = Saves(tmp_path, every_steps=1)
    saves.step(1)

    def die(folder: Path, step: int) -> None:
        raise death

    saves.checkpoints._save_workers = die
    with pytest.raises(type(death)) as caught:
        saves.step(2)
    assert is_restartable(5, error=type(translate(caught.value)).__name__)
    assert find_newest(tmp_path).newest == checkpoint_folder(tmp_path, step=1)


def test_the_driver_goes_on_with_the_same_random_numbers(tmp_path: Path) -> None:
    saves = Saves(tmp_path / "run", every_steps=1)
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    torch.randn(5), random.gauss(0, 1), np.random.randn(3)
    saves.step(1)
    meant = (torch.randn(3).tolist(), random.gauss(0, 1), np.random.randn(2).tolist())
    saves.checkpoints.restore(checkpoint_folder(saves.run_dir, step=1))
    assert (torch.randn(3).tolist(), random.gauss(0, 1), np.random.randn(2).tolist()) == meant
    assert saves.checkpoints.saved_step == 1 and saves.checkpoints.save_now("SIGTERM") is not None


def test_a_random_state_survives_json() -> None:
    random.gauss(0, 1)
    before = take_random()
    restore_random(type(before)(**json.loads(json.dumps(vars(before)))))
    assert take_random() == before


class Problems(Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def loader(count: int = 10) -> StatefulDataLoader:
    from omegaconf import OmegaConf

    config = OmegaConf.create({"shuffle": True, "seed": 0})
    sampler = create_rl_sampler(config, Problems(count))
    return StatefulDataLoader(Problems(count), batch_size=4, num_workers=0, drop_last=True, sampler=sampler)


def batches(data: StatefulDataLoader, first: Iterator | None = None) -> Iterator[list[int]]:
    """As verl's trainer takes them, over the ends of epochs."""
    running = first or iter(data)
    while True:
        try:
            yield next(running).tolist()
        except StopIteration:
            running = iter(data)


@pytest.mark.parametrize("after", range(1, 8))
def test_the_data_goes_on_where_it_was_over_the_end_of_an_epoch(after: int) -> None:
    """verl's sampler and loader, two batches an epoch: the order of all later epochs is the same too."""
    whole = loader()
    running = batches(whole)
    for _ in range(after):
        next(running)
    state = whole.state_dict()
    meant = [next(running) for _ in range(9)]
    other = loader()
    other.load_state_dict(state)
    going_on = batches(other, at_its_place(other))
    assert [next(going_on) for _ in range(9)] == meant


@pytest.mark.parametrize("after", range(1, 6))
def test_fewer_problems_than_a_run_had_are_a_new_epoch_at_most(after: int) -> None:
    whole, fewer = loader(20), loader(8)
    running = batches(whole)
    for _ in range(after):
        next(running)
    fewer.load_state_dict(whole.state_dict())
    going_on = batches(fewer, at_its_place(fewer))
    assert all(max(next(going_on)) < 8 for _ in range(9))


def test_a_full_disk_leaves_the_older_checkpoint_and_a_clear_end(disk_of: Callable[[str], Path]) -> None:
    small_disk = disk_of("24m")
    saves = Saves(small_disk / "run", every_steps=1)
    saves.rank_bytes = 10 << 20
    saves.step(1)
    saves.rank_bytes = 20 << 20
    with pytest.raises(TrainingError) as caught:
        saves.step(2)
    where = small_disk / "run" / "checkpoints"
    assert caught.value.exit_code == 5
    assert caught.value.message == f"checkpoint global_step_2 could not be written: no space left at {where}"
    assert caught.value.hint == "free some space, then resume with --resume auto: global_step_1 is whole"
    assert saves.names == ["global_step_1"]
    assert find_newest(small_disk / "run").newest == where / "global_step_1"


class Failing(Saves):
    """Ranks that write nothing."""

    error: Exception

    def _save(self, folder: Path, step: int) -> None:
        raise self.error


HIDDEN = RuntimeError("[enforce fail at inline_container.cc:664] unexpected pos 64 vs 0")  # torch's, on a full disk
NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_a_rank_raises_in_a_save_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it arrives from Ray; it would be there again at the next attempt. But first who watches the processes has time
    to end this one: a rank raises too when the one it waits for died."""
    waited_s: list[float] = []
    monkeypatch.setattr(checkpoints.time, "sleep", waited_s.append)
    saves = Failing(tmp_path, every_steps=1)
    words = "the rank's own words"
    task = RayTaskError("save_checkpoint", words, KeyError("moment"), proctitle="rank", pid=1, ip="127.0.0.1")
    saves.error = task.as_instanceof_cause()
    with pytest.raises(CheckpointError) as caught:
        saves.step(1)
    assert caught.value.message == f"checkpoint global_step_1 could not be written: RayTaskError(KeyError): {words}"
    assert waited_s == [NAMED_AFTER_S]


@pytest.mark.parametrize(
    ("full", "error", "why"),
    [
        ("checkpoints", HIDDEN, "no space left at {large}"),
        ("checkpoints", NO_SPACE, "no space left at {large}"),
        ("run", HIDDEN, f"RuntimeError: {HIDDEN}"),  # ranks write to the other disk
        ("run", NO_SPACE, "no space left at {run}"),  # metrics.jsonl is brought to the disk with a checkpoint
        ("none", HIDDEN, f"RuntimeError: {HIDDEN}"),
        ("none", NO_SPACE, "no space left at {large}"),  # a quota
    ],
)
def test_the_disk_that_is_full_is_the_one_that_is_named(
    tmp_path: Path, disk_of: Callable[[str], Path], full: str, error: Exception, why: str
) -> None:
    """`checkpoints/` is a link to another disk. One of 12 MiB counts as full."""
    disk = disk_of("40m" if full == "none" else "12m")
    run, large = (disk / "run", tmp_path / "large") if full == "run" else (tmp_path / "run", disk / "large")
    saves = Failing(run, every_steps=1)
    saves.error = error
    large.mkdir()
    (run / "checkpoints").symlink_to(large)
    with pytest.raises(CheckpointError) as caught:
        saves.step(1)
    where = why.format(large=large, run=run)
    assert caught.value.message == f"checkpoint global_step_1 could not be written: {where}"
    assert list(large.iterdir()) == []

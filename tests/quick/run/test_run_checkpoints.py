"""The folder of checkpoints: the newest whole one, retention, and what is set aside."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from appliance.record.checkpoints import (
    CheckpointSearch,
    Facts,
    Rejected,
    checkpoint_folder,
    find_newest,
    half_done,
    in_order,
    partial_of,
    put_in_place,
    remove_surplus,
    seal,
    set_aside,
    surplus,
)


def facts(step: int, *, val_reward: float | None = None) -> Facts:
    return Facts(step=step, world_size=1, reason="", time=0.0, val_reward=val_reward)


def save(run_dir: Path, step: int, *, val_reward: float | None = None) -> Path:
    folder = checkpoint_folder(run_dir, step=step)
    partial = partial_of(folder)
    partial.mkdir(parents=True)
    (partial / "data.pt").write_bytes(b"state of step %d" % step)
    seal(partial, facts=facts(step, val_reward=val_reward))
    put_in_place(partial, folder=folder)
    return folder


def names(run_dir: Path) -> list[str]:
    return sorted(each.name for each in (run_dir / "checkpoints").iterdir())


def test_folders_come_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for step in (10, 9, 100):
        save(tmp_path, step)
    (tmp_path / "checkpoints" / "global_step_x").mkdir()
    (tmp_path / "checkpoints" / "partial-global_step_7").mkdir()
    assert [each.name for each in in_order(tmp_path)] == ["global_step_9", "global_step_10", "global_step_100"]


def test_the_newest_whole_one_is_found_and_what_was_passed_over_is_said(tmp_path: Path) -> None:
    older, newer, newest = (save(tmp_path, step) for step in (2, 4, 6))
    (newest / "manifest.json").unlink()
    (newer / "data.pt").write_bytes(b"state of step 5")
    assert find_newest(tmp_path) == CheckpointSearch(
        older,
        rejected=(
            Rejected(newest, "no manifest.json"),
            Rejected(newer, "data.pt has other content than was saved"),
        ),
    )


def test_a_checkpoint_under_the_name_of_another_step_is_not_gone_on_from(tmp_path: Path) -> None:
    """The step counts for data and metrics, and the weights would be another one's."""
    older = save(tmp_path, 2)
    copy = shutil.copytree(older, checkpoint_folder(tmp_path, step=7))
    assert find_newest(tmp_path) == CheckpointSearch(older, rejected=(Rejected(copy, "manifest.json is of step 2"),))


def test_nothing_whole_is_an_answer(tmp_path: Path) -> None:
    assert find_newest(tmp_path) == CheckpointSearch(None)
    (save(tmp_path, 1) / "data.pt").unlink()
    assert find_newest(tmp_path).newest is None


@pytest.mark.parametrize(
    ("keep", "keep_best", "gone"),
    [
        (None, False, []),
        (1, False, [2, 4, 6, 8]),
        (2, False, [2, 4, 6]),
        (5, False, []),
        (9, False, []),
        (1, True, [2, 6, 8]),  # 4 is the best
        (4, True, [2]),
    ],
)
def test_retention(keep: int | None, keep_best: bool, gone: list[int]) -> None:
    rewards = {2: 0.5, 4: 0.9, 6: None, 8: 0.7, 10: None}
    saved = [facts(step, val_reward=reward) for step, reward in rewards.items()]
    assert surplus(saved, keep=keep, keep_best=keep_best) == gone


def test_of_equally_good_ones_the_newest_stays() -> None:
    saved = [facts(1, val_reward=0.5), facts(2, val_reward=0.5), facts(3), facts(4)]
    assert surplus(saved, keep=1, keep_best=True) == [1, 3]


def test_a_checkpoint_under_the_name_of_another_step_is_left_alone(tmp_path: Path) -> None:
    save(tmp_path, 2)
    save(tmp_path, 1).rename(checkpoint_folder(tmp_path, step=7))
    assert remove_surplus(tmp_path, keep=1, keep_best=False) == []
    assert names(tmp_path) == ["global_step_2", "global_step_7"]


def test_retention_counts_what_earlier_attempts_left_and_spares_what_it_cannot_read(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (checkpoint_folder(tmp_path, step=1) / "manifest.json").unlink()
    assert remove_surplus(tmp_path, keep=2, keep_best=False) == [2]
    assert names(tmp_path) == ["global_step_1", "global_step_3", "global_step_4"]


def test_a_deletion_that_was_cut_is_finished_by_the_next(tmp_path: Path) -> None:
    left = save(tmp_path, 1)
    left.rename(left.with_name("deleting-global_step_1"))
    save(tmp_path, 2)
    assert [each.name for each in half_done(tmp_path)] == ["deleting-global_step_1"]
    assert remove_surplus(tmp_path, keep=1, keep_best=False) == []
    assert names(tmp_path) == ["global_step_2"]


def test_what_is_set_aside_takes_no_other_place(tmp_path: Path) -> None:
    for _ in range(3):
        set_aside(save(tmp_path, 5), below="damaged")
    kept = sorted(each.name for each in (tmp_path / "checkpoints" / "damaged").iterdir())
    assert kept == ["global_step_5", "global_step_5-2", "global_step_5-3"]

"""A data set of the hub as `datasets` gives it: here from its cache, with the hub away."""

from __future__ import annotations

import os
from pathlib import Path

import datasets
import huggingface_hub
import pytest
from datasets.arrow_writer import ArrowWriter
from datasets.packaged_modules.cache.cache import Cache
from plans import make_files, make_own_task, make_task

from appliance.errors import RecipeError
from appliance.record.liveness import HEARTBEAT_FILE
from appliance.tasks import own_task
from appliance.terms.environment import LOG_DIR_VARIABLE

ROWS = [{"question": f"{n}+1?", "answer": n + 1, "image": b"\x00"} for n in range(5)]
OLD, NEW = "0" * 40, "1" * 40
HINT = "look at its name, task.config and task.split; without a network give task.train_file"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of `datasets` with `me/sums` in it, at one commit; no hub."""
    put(tmp_path / "cache", commit=OLD, rows=ROWS)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def put(cache: Path, *, commit: str, rows: list[dict[str, object]]) -> None:
    folder = cache / "me___sums" / "default" / "0.0.0" / commit
    folder.mkdir(parents=True)
    data = datasets.Dataset.from_list(rows)
    with ArrowWriter(path=str(folder / "sums-train.arrow"), features=data.features) as writer:
        for row in rows:
            writer.write(row)
        count, size = writer.finalize()
    splits = datasets.SplitDict({"train": datasets.SplitInfo("train", size, count, dataset_name="sums")})
    names = {"builder_name": "parquet", "dataset_name": "sums", "config_name": "default", "version": "0.0.0"}
    datasets.DatasetInfo(features=data.features, splits=splits, **names).write_to_directory(str(folder))


def splits(name: str = "me/sums", *, config: str = "", split: str = "train", commit: str = ""):
    settings = make_own_task(data=name, config=config or None, split=split, prompt="question", truth="answer")
    return own_task.task(settings, files=make_files(commit=commit)).splits(make_task(val_size=2))


def refusal(**given: str) -> tuple[str, str]:
    with pytest.raises(RecipeError) as error:
        splits(**given)
    (problem,) = error.value.problems
    return problem


def test_a_data_set_in_the_cache_needs_no_hub(cache: Path) -> None:
    problem_sets = splits()
    assert (len(problem_sets.train), len(problem_sets.val)) == (3, 2)
    assert {each.prompt: each.truth for each in (*problem_sets.train, *problem_sets.val)} == {
        f"{n}+1?": str(n + 1) for n in range(5)
    }
    assert (
        problem_sets.train[0].row
        == f'{{"question": "{problem_sets.train[0].prompt}", "answer": {problem_sets.train[0].truth}}}'
    )
    assert problem_sets.notes == ("train: `image`: not in the rows that rewards get, bytes are no JSON",)


def test_a_data_set_is_read_at_its_commit_or_not_at_all(cache: Path) -> None:
    """Of two versions in the cache `datasets` takes the newest."""
    begun = splits(commit=OLD)
    assert begun == splits()
    put(cache, commit=NEW, rows=[row | {"answer": -1} for row in ROWS])
    for commit, time in ((OLD, 1), (NEW, 2)):
        os.utime(cache / "me___sums" / "default" / "0.0.0" / commit, (time, time))
    assert {each.truth for each in splits(commit=NEW).train} == {"-1"}
    message = f"task.data: me/sums cannot be had at {OLD}: the hub does not give it, and this host has {NEW}"
    assert refusal(commit=OLD) == (message, "start when the hub gives it, or give task.train_file")


def test_a_data_set_is_asked_of_the_hub_at_its_commit(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load, revisions = datasets.load_dataset_builder, []
    monkeypatch.setattr(
        datasets, "load_dataset_builder", lambda *of, **how: revisions.append(how["revision"]) or load(*of, **how)
    )
    assert splits(commit=OLD) == splits()
    assert revisions == [OLD, None]


def test_a_download_shows_signs_of_life(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` downloads by huggingface_hub, then writes its own files: each moves a bar of its own."""
    monkeypatch.setenv(LOG_DIR_VARIABLE, str(tmp_path))
    splits()
    assert not (tmp_path / HEARTBEAT_FILE).exists()
    for kind in (huggingface_hub.utils.tqdm, datasets.utils.tqdm):
        bar = kind(total=2, disable=True)
        monkeypatch.setattr(Cache, "download_and_prepare", lambda self, bar=bar: bar.update(1))
        splits()
        (tmp_path / HEARTBEAT_FILE).unlink()
        bar.update(1)
        assert not (tmp_path / HEARTBEAT_FILE).exists()


def test_an_unknown_split_names_those_there_are(cache: Path) -> None:
    message = "task.data: me/sums cannot be had: Unknown split \"test\". Should be one of ['train']."
    assert refusal(split="test") == (message, HINT)


def test_an_unknown_configuration(cache: Path) -> None:
    message = "task.data: me/sums cannot be had: Couldn't find cache for me/sums for config 'main'"
    assert refusal(config="main") == (message, HINT)


def test_a_data_set_that_is_not_in_the_cache(cache: Path) -> None:
    message = "task.data: me/other cannot be had: Couldn't reach 'me/other' on the Hub (OfflineModeIsEnabled)"
    assert refusal(name="me/other") == (message, HINT)


def test_a_folder_of_the_same_name_is_not_taken_for_it(cache: Path) -> None:
    Path("me/sums").mkdir(parents=True)
    message = "task.data: me/sums: a file or folder of this name is here"
    assert refusal(name="me/sums") == (message, "use task.train_file")

"""A data set of the hub as `datasets` gives it: here from its cache, with the hub away."""

from __future__ import annotations

from pathlib import Path

import datasets
import huggingface_hub
import pytest
from datasets.arrow_writer import ArrowWriter

from appliance.errors import RecipeError
from appliance.record.plan import OwnPlan
from appliance.tasks import own

ROWS = [{"question": f"{n}+1?", "answer": n + 1, "image": b"\x00"} for n in range(5)]
HINT = "look at its name, task.config and task.split; without a network give task.train_file"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of `datasets` with `me/sums` in it; no hub."""
    folder = tmp_path / "cache" / "me___sums" / "default" / "0.0.0" / ("0" * 40)
    folder.mkdir(parents=True)
    data = datasets.Dataset.from_list(ROWS)
    with ArrowWriter(path=str(folder / "sums-train.arrow"), features=data.features) as writer:
        for row in ROWS:
            writer.write(row)
        rows, size = writer.finalize()
    splits = datasets.SplitDict({"train": datasets.SplitInfo("train", size, rows, dataset_name="sums")})
    names = {"builder_name": "parquet", "dataset_name": "sums", "config_name": "default", "version": "0.0.0"}
    datasets.DatasetInfo(features=data.features, splits=splits, **names).write_to_directory(str(folder))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def splits(name: str = "me/sums", *, config: str = "", split: str = "train", commit: str = ""):
    plan = OwnPlan(
        data=name,
        config=config,
        split=split,
        prompt="question",
        template="",
        system="",
        truth="answer",
        rewards=(),
        tools="",
        max_turns=1,
        code=(),
        commit=commit,
    )
    return own.task(plan).splits(difficulty=2, train_file="", val_file="", seed=0, train_size=0, val_size=2)


def refusal(**given: str) -> tuple[str, str]:
    with pytest.raises(RecipeError) as error:
        splits(**given)
    (problem,) = error.value.problems
    return problem


def test_a_data_set_in_the_cache_needs_no_hub(cache: Path) -> None:
    made = splits()
    assert (len(made.train), len(made.val)) == (3, 2)
    assert {each.prompt: each.truth for each in (*made.train, *made.val)} == {f"{n}+1?": str(n + 1) for n in range(5)}
    assert made.train[0].row == f'{{"question": "{made.train[0].prompt}", "answer": {made.train[0].truth}}}'
    assert made.notes == ("train: `image`: not in the rows that rewards get, bytes are no JSON",)


def test_a_data_set_is_read_at_its_commit(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load, revisions = datasets.load_dataset, []
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *of, **how: revisions.append(how["revision"]) or load(*of, **how)
    )
    assert splits(commit="0" * 40) == splits()
    assert revisions == ["0" * 40, None]


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

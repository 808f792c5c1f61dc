"""`appliance data`: files that recipes read, made once, resumed where they are missing."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from plans import make_task

from appliance.errors import PreflightError, RecipeError
from appliance.launch import data as command
from appliance.launch.data import make_data
from appliance.tasks.built_in import dapo_math, gsm8k
from appliance.tasks.built_in.dapo_math import AFTER, BEFORE

NO_FILE = "give the path of a {} file; a relative one begins in the folder where the program is started"


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "own.jsonl"
    rows = [{"problem": f"What is {number % 3}?", "answer": str(number % 3)} for number in range(9)]
    path.write_text("\n".join(map(json.dumps, [*rows, {"problem": "What is 1?", "answer": "7"}])))
    return str(path)


def test_a_file_is_in_verls_schema_and_counted(tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]) -> None:
    make_data("dapo-math-17k", folder=tmp_path / "made", sources=(source,))
    target = tmp_path / "made" / "dapo-math-17k.parquet"
    said = capsys.readouterr()
    assert said.out == f"{target}\n"
    assert said.err.splitlines() == [
        "dapo-math-17k.parquet: 10 rows, 3 problems, 7 rows repeat a problem (1 with another answer: the first one "
        "counts)"
    ]
    first = pq.read_table(target).to_pylist()[0]
    assert first == {
        "data_source": "dapo-math",
        "prompt": [{"role": "user", "content": f"{BEFORE}What is 0?{AFTER}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "0"},
        "extra_info": {"split": "train", "index": 0, "row": ""},
    }
    about = json.loads(target.with_suffix(".json").read_text())
    assert (about["source"], about["rows"], about["problems"], about["conflicting"]) == (source, 10, 3, 1)
    assert sorted(path.name for path in target.parent.iterdir()) == ["dapo-math-17k.json", "dapo-math-17k.parquet"]


def test_what_it_makes_a_recipe_reads(tmp_path: Path, source: str) -> None:
    make_data("dapo-math-17k", folder=tmp_path, sources=(source,))
    path = str(tmp_path / "dapo-math-17k.parquet")
    made = dapo_math.TASK.splits(make_task(train_file=path, val_size=1))
    assert (len(made.train), len(made.val), made.notes) == (2, 1, ())


def test_what_is_there_is_left_alone_and_what_is_missing_is_made(tmp_path: Path) -> None:
    files = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps({"question": f"How many {name}?", "answer": "#### 3"}))
        files.append(str(path))
    folder = tmp_path / "made"
    make_data("gsm8k", folder=folder, sources=tuple(files))
    train, val = folder / "gsm8k-train.parquet", folder / "gsm8k-val.parquet"
    before = train.stat().st_mtime_ns
    val.unlink()
    make_data("gsm8k", folder=folder, sources=tuple(files))
    assert (train.stat().st_mtime_ns, val.is_file()) == (before, True)
    assert gsm8k.TASK.first_problems(1, file=val, difficulty=0, seed=0)[0].prompt == "How many b?" + gsm8k.INSTRUCTION


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("dapo-math-17k", {"dapo-math-17k": 2}),
        ("aime-2024", {"aime-2024": 2}),
        ("gsm8k", {"gsm8k-train": 2, "gsm8k-val": 2}),
    ],
)
def test_every_data_set_is_made_from_the_hub(
    name: str,
    files: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The network alone is not the real one. The second time nothing is asked for."""
    import huggingface_hub

    downloads = []
    rows = [{"problem": "What is 1?", "answer": "1"}, {"problem": "What is 2?", "answer": "2"}] * 2
    words = [{"question": each["problem"], "answer": f"#### {each['answer']}"} for each in rows[:3]]

    def download(hub: str, file: str, **_: object) -> str:
        downloads.append(file)
        kept = tmp_path / Path(file).name
        pq.write_table(pa.Table.from_pylist(words if hub == "openai/gsm8k" else rows[:3]), kept)
        return str(kept)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    folder = tmp_path / "made"
    make_data(name, folder=folder)
    assert {path.stem: pq.read_table(path).num_rows for path in folder.glob("*.parquet")} == files
    said = [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert said == ["3 rows, 2 problems, 1 row repeats a problem"] * len(files)
    assert len(downloads) == len(files)
    make_data(name, folder=folder)
    assert len(downloads) == len(files)


def test_another_source_is_made_anew(tmp_path: Path, source: str) -> None:
    make_data("aime-2024", folder=tmp_path, sources=(source,))
    Path(source).write_text(json.dumps({"problem": "What is 8?", "answer": "8"}))
    make_data("aime-2024", folder=tmp_path, sources=(source,))
    assert pq.read_table(tmp_path / "aime-2024.parquet").num_rows == 1


def test_a_file_that_nothing_tells_of_is_not_taken_for_the_one_before(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (other := tmp_path / "other.jsonl").write_text(json.dumps({"problem": "What is 9?", "answer": "9"}))
    make_data("dapo-math-17k", folder=tmp_path / "made", sources=(source,))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(command, "write_whole", interrupted)
        make_data("dapo-math-17k", folder=tmp_path / "made", sources=(str(other),))
    make_data("dapo-math-17k", folder=tmp_path / "made", sources=(source,))
    assert pq.read_table(tmp_path / "made" / "dapo-math-17k.parquet").num_rows == 3


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_half_a_file_is_never_there(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, path: Path, **kwargs: object) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(command, "write_parquet", fail)
    with pytest.raises(PreflightError) as caught:
        make_data("aime-2024", folder=tmp_path / "made", sources=(source,))
    assert caught.value.message == f"{tmp_path / 'made'}: no space left"
    assert not (tmp_path / "made").exists()


def test_a_refused_source_leaves_no_folder_that_was_made_for_it(tmp_path: Path) -> None:
    (there := tmp_path / "there").mkdir()
    for folder in (tmp_path / "new" / "made", there):
        with pytest.raises(RecipeError, match=r"none\.jsonl: no such file"):
            make_data("aime-2024", folder=folder, sources=("none.jsonl",))
    assert list(tmp_path.iterdir()) == [there]


def test_a_folder_that_cannot_be_made_is_no_fault_of_what_was_typed(source: str) -> None:
    """/proc takes none from root either."""
    with pytest.raises(PreflightError) as caught:
        make_data("aime-2024", folder=Path("/proc/made"), sources=(source,))
    assert (caught.value.message, caught.value.hint) == (
        "/proc/made: No such file or directory",
        "set -o to another folder",
    )


@pytest.mark.parametrize(
    ("name", "sources", "problem"),
    [
        ("math", (), ("math: no data set has this name", "use `gsm8k`, `dapo-math-17k`, `aime-2024`")),
        (
            "gsm8k",
            ("a",),
            ("--from: 1 given, `gsm8k` needs 2", "give a file for each of gsm8k-train.parquet, gsm8k-val.parquet"),
        ),
        ("aime-2024", ("none.jsonl",), ("none.jsonl: no such file", NO_FILE.format("JSON-lines or parquet"))),
    ],
)
def test_what_cannot_be_made(tmp_path: Path, name: str, sources: tuple[str, ...], problem: tuple[str, str]) -> None:
    with pytest.raises(RecipeError) as caught:
        make_data(name, folder=tmp_path, sources=sources)
    assert caught.value.problems == [problem]

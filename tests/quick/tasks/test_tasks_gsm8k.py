"""GSM8K: what counts as an answer, and what bad rows get."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest
from finding_texts import texts
from plans import make_task

from appliance.errors import RecipeError
from appliance.settings.sections import ValSet
from appliance.tasks.built_in.gsm8k import INSTRUCTION, TASK, final_number, score
from appliance.tasks.rows import Problem

NO_FILE = "give the path of a {} file; a relative one begins in the folder where the program is started"

HINT = 'each line is a JSON object with `question` and `answer`, both text, the number after "####" in `answer`'


def row(number: int, *, answer: int | None = None) -> str:
    question = f"A baker makes {number} loaves and sells none. How many loaves are left?"
    return json.dumps({"question": question, "answer": f"Nothing is sold.\n#### {answer or number:,}"})


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 72", Decimal(72)),
        ("####72", Decimal(72)),
        ("so 5\n#### 72\n", Decimal(72)),
        ("#### 1 then #### 2", Decimal(2)),
        ("#### 1,234,567", Decimal(1234567)),
        ("#### $1,234.50", Decimal("1234.50")),
        ("#### -7", Decimal(-7)),
        ("#### -$7", Decimal(-7)),
        ("#### $-7", Decimal(-7)),
        ("#### .5", Decimal("0.5")),
        ("#### \u22127", Decimal(-7)),
        ("#### \u2013$7", None),
        ("#### 1\n#### $\u20137.5", Decimal("-7.5")),
        ("#### 1e3", Decimal(1000)),
        ("#### 1e1000", None),
        ("#### 72.", Decimal(72)),
        ("#### 72 loaves", Decimal(72)),
        ("#### 50%", Decimal(50)),
        ("#### 3\n#### none", Decimal(3)),
        ("### 72", None),
        ("72", None),
        ("####\n72", None),
        ("#### seventy 2", None),
        ("#### x72", None),
        ("#### 72x", None),
        ("#### 1.2.3", None),
        ("#### --7", None),
        ("#### -$-7", None),
        ("#### 7\n#### --8", Decimal(7)),
        ("####", None),
        ("", None),
    ],
)
def test_final_number_is_the_last_after_four_hashes(text: str, number: Decimal | None) -> None:
    assert final_number(text) == number


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [
        ("#### 1,234", "1234", 1.0),
        ("#### $72.00", "72", 1.0),
        ("#### 73", "72", 0.0),
        ("#### --72", "72", 0.0),
        ("the answer is 72", "72", 0.0),
        ("#### 72 no, #### 73", "72", 0.0),
        ("<think>\n#### 72\n</think>\nI do not know.", "72", 0.0),
        ("#### 72\n</think>\n#### 73", "73", 1.0),
    ],
)
def test_score_compares_numbers_not_text(response: str, truth: str, reward: float) -> None:
    assert score(response=response, truth=truth) == reward


def test_read_problems_asks_for_the_answer_format(tmp_path: Path) -> None:
    problems = TASK.first_problems(9, file=write(tmp_path / "rows.jsonl", row(1200), "", row(3)), difficulty=0, seed=0)
    question = "A baker makes 1200 loaves and sells none. How many loaves are left?"
    assert problems[0] == Problem(prompt=question + INSTRUCTION, truth="1200")
    assert [each.truth for each in problems] == ["1200", "3"]


def test_a_small_number_is_a_truth_that_is_read_again(tmp_path: Path) -> None:
    small = json.dumps({"question": "How much?", "answer": "#### 0.0000001"})
    (problem,) = TASK.first_problems(1, file=write(tmp_path / "rows.jsonl", small), difficulty=0, seed=0)
    assert problem.truth == "0.0000001"
    assert [score(response=each, truth=problem.truth) for each in TASK.answers(problem.truth)] == [1.0]


def test_check_rows_finds_nothing_in_good_rows(tmp_path: Path) -> None:
    assert TASK.check_rows(write(tmp_path / "rows.jsonl", row(1), row(2))) == []


def test_check_rows_names_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    assert texts(TASK.check_rows(path)) == [(f"{path}: no such file", NO_FILE.format("JSON-lines or parquet"))]


def test_check_rows_names_a_folder(tmp_path: Path) -> None:
    message = f"{tmp_path}: it is a folder (empty), but only one file is read"
    assert texts(TASK.check_rows(tmp_path)) == [(message, "name one file: JSON lines or parquet")]


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_check_rows_names_an_empty_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(text)
    assert texts(TASK.check_rows(path)) == [(f"{path}: the file has no rows", HINT)]


def test_check_rows_gives_every_problem_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [
        row(1).encode(),
        b"not json",
        b"[1]",
        b'{"question": "How many?"}',
        b'{"question": 3, "answer": "#### 3"}',
        b'{"question": "How many?", "answer": " "}',
        b'{"question": "How many?", "answer": "three"}',
        b'{"question": "\xff"}',
        b"[" * 100_000,
    ]
    path.write_bytes(b"\n".join(lines))
    assert texts(TASK.check_rows(path)) == [
        (f"{path}:2: not JSON: Expecting value at column 1", HINT),
        (f"{path}:3: not a JSON object", HINT),
        (f"{path}:4: the field `answer` is missing", HINT),
        (f"{path}:5: the field `question` is not text, or empty", HINT),
        (f"{path}:6: the field `answer` is not text, or empty", HINT),
        (f"{path}:7: the field `answer` has no number after `####`", HINT),
        (f"{path}:8: not UTF-8 text", HINT),
        (f"{path}:9: not JSON: nested too deeply", HINT),
    ]


def test_check_rows_counts_what_it_does_not_show(tmp_path: Path) -> None:
    """Where a row is right: what is wrong with all of them is one fault."""
    good = json.dumps({"question": "1 + 1?", "answer": "#### 2"})
    path = write(tmp_path / "rows.jsonl", *["{}"] * 23, good)
    faults = TASK.check_rows(path)
    assert texts(faults[:19]) == [(f"{path}:{line}: the field `question` is missing", HINT) for line in range(1, 20)]
    assert texts(faults[19:]) == [(f"{path}: and 4 more", "")]
    assert RecipeError(faults).shown == texts(faults)  # not cut once more: `and 1 more` would be the line that counts
    path = write(tmp_path / "rows.jsonl", *["{}"] * 23)
    assert texts(TASK.check_rows(path)) == [
        (f"{path}:1: the field `question` is missing (the same in all 23 rows)", HINT)
    ]
    path = write(tmp_path / "rows.jsonl", *["{}"] * 22, "[]")
    assert len(TASK.check_rows(path)) == 20


def test_splits_raise_for_both_files_at_once(tmp_path: Path) -> None:
    train, val = write(tmp_path / "train.jsonl", "{"), str(tmp_path / "none.jsonl")
    with pytest.raises(RecipeError) as caught:
        TASK.splits(make_task(train_file=train, val_file=val, val_size=2))
    assert caught.value.message.splitlines() == [
        f"{train}:1: not JSON: Expecting property name enclosed in double quotes at column 2",
        f"task.val_file: {val}: no such file",
    ]


def test_splits_hold_out_validation_by_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *[row(number) for number in range(50)], row(7))
    by_seed = [TASK.splits(make_task(train_file=path, seed=seed, val_size=10)) for seed in (0, 0, 1)]
    assert by_seed[0] == by_seed[1]
    assert set(by_seed[0].val) != set(by_seed[2].val)
    assert (len(by_seed[0].train), len(by_seed[0].val)) == (40, 10)
    assert not set(by_seed[0].train) & set(by_seed[0].val)


@pytest.mark.parametrize("val_size", [5, 6])
def test_splits_refuse_a_hold_out_that_leaves_one_side_empty(tmp_path: Path, val_size: int) -> None:
    path = write(tmp_path / "rows.jsonl", *[row(number) for number in range(5)])
    with pytest.raises(RecipeError) as caught:
        TASK.splits(make_task(train_file=path, val_size=val_size))
    message = (
        f"task.val_size: {val_size} of the 5 problems in {path} leave no problem for training or none for validation"
    )
    assert caught.value.problems == [(message, "use 1 to 4, or give task.val_file")]


def test_splits_take_the_first_of_each_file(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", *[row(number) for number in range(9)])
    val = write(tmp_path / "val.jsonl", *[row(number) for number in range(100, 109)])
    made = TASK.splits(make_task(train_file=train, val_file=val, train_size=4, val_size=3))
    assert len(made.train) == 4
    assert [each.truth for each in made.val] == ["100", "101", "102"]


def on_the_hub(monkeypatch: pytest.MonkeyPatch, folder: Path, **rows: list[str]) -> list[tuple[str, str, str]]:
    """The network alone is not the real one. Returns what is asked for."""
    import huggingface_hub
    import pyarrow as pa
    import pyarrow.parquet as pq

    requests = []

    def download(name: str, file: str, *, repo_type: str) -> str:
        requests.append((name, file, repo_type))
        kept = folder / Path(file).name
        pq.write_table(pa.Table.from_pylist([json.loads(each) for each in rows[kept.name.partition("-")[0]]]), kept)
        return str(kept)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return requests


def test_a_hub_that_has_it_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A row that is there twice counts once, one of both splits is validated."""
    train = [row(1200), row(3), row(1200), row(3, answer=9), row(5)]
    requests = on_the_hub(monkeypatch, tmp_path, train=train, test=[row(5), row(7)])
    problem_sets = TASK.splits(make_task(val_size=2))
    files = ["main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"]
    assert requests == [("openai/gsm8k", file, "dataset") for file in files]
    assert {each.truth for each in problem_sets.train} == {"1200", "3"} and len(problem_sets.train) == 2
    assert [each.truth for each in problem_sets.val] == ["5", "7"]
    assert (
        problem_sets.val[1].prompt == "A baker makes 7 loaves and sells none. How many loaves are left?" + INSTRUCTION
    )
    assert problem_sets.notes == (
        "train: 5 rows, 3 distinct problems: each counts once",
        "train: 1 row repeats a problem with another answer: the first one counts",
        "train: 1 problem is in the validation data as well and is left out",
    )


def test_of_the_hubs_validation_nothing_is_counted_where_all_sets_are_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_the_hub(monkeypatch, tmp_path, train=[row(3), row(5)], test=[row(9)])
    (tmp_path / "own.jsonl").write_text(row(7))
    sets = {"own": ValSet(file=str(tmp_path / "own.jsonl"), temperature=0.0)}
    made = TASK.splits(make_task(val_sets=sets))
    assert ({each.truth for each in made.train}, made.notes) == ({"3", "5"}, ())
    assert [each.truth for each in made.val_sets["own"]] == ["7"]


def test_what_the_hub_has_for_validation_is_not_trained_on_where_all_sets_are_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_the_hub(monkeypatch, tmp_path, train=[row(3), row(5), row(9)], test=[row(9)])
    (tmp_path / "own.jsonl").write_text(row(7))
    sets = {"own": ValSet(file=str(tmp_path / "own.jsonl"), temperature=0.0)}
    assert {each.truth for each in TASK.splits(make_task(val_sets=sets)).train} == {"3", "5"}


def test_a_connection_that_breaks_is_told_as_a_hub_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    import huggingface_hub

    def download(*_: object, **__: object) -> str:
        raise httpx.ReadError("reset by peer")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(RecipeError) as caught:
        TASK.splits(make_task(val_size=2))
    message = "task.train_file: no data file is given, and openai/gsm8k cannot be had from the hub: reset by peer"
    hint = "give a file: task.train_file in a recipe, --from with `appliance data`"
    assert caught.value.problems == [(message, hint)]


def test_bad_rows_of_the_hub_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_the_hub(monkeypatch, tmp_path, train=[json.dumps({"question": "How many?", "answer": "three"}), row(3)])
    with pytest.raises(RecipeError) as caught:
        TASK.splits(make_task(val_size=2))
    assert caught.value.problems == [("openai/gsm8k:1: the field `answer` has no number after `####`", HINT)]


def test_splits_say_when_the_hub_is_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(RecipeError) as caught:
        TASK.splits(make_task(val_size=2))
    ((message, hint),) = caught.value.problems
    assert message.startswith("task.train_file: no data file is given, and openai/gsm8k cannot be had from the hub: ")
    assert hint == "give a file: task.train_file in a recipe, --from with `appliance data`"

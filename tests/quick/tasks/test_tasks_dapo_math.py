"""DAPO-Math-17k and AIME 2024: rows in their real schema, each problem once, and what counts as an answer."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from finding_texts import texts
from plans import make_task

from appliance.errors import RecipeError
from appliance.tasks.built_in import dapo_math
from appliance.tasks.built_in.dapo_math import AFTER, BEFORE, HINT, TASK, final_answer, score
from appliance.tasks.rows import Problem

NO_FILE = "give the path of a {} file; a relative one begins in the folder where the program is started"

# The columns of the files on the hub, as their cards tell them. AIME's extra_info has the bare problem too.
MESSAGES = pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))
REWARD = pa.struct([("ground_truth", pa.string()), ("style", pa.string())])
TRAIN_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", MESSAGES),
        ("ability", pa.string()),
        ("reward_model", REWARD),
        ("extra_info", pa.struct([("index", pa.string())])),
    ]
)
AIME_SCHEMA = TRAIN_SCHEMA.set(
    4, pa.field("extra_info", pa.struct([("index", pa.int64()), ("raw_problem", pa.string()), ("split", pa.null())]))
)


def row(number: int, *, answer: str | None = None, index: object = "a-uuid", **extra: object) -> dict[str, object]:
    problem = f"What is ${number} + {number}$?"
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": BEFORE + problem + AFTER, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer or str(2 * number), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index, **extra},
    }


def write(path: Path, rows: list[dict[str, object]], schema: pa.Schema = TRAIN_SCHEMA) -> str:
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return str(path)


def train_file(folder: Path) -> str:
    """7 problems, each 100 times as in the real file, in no order; one row of them with another answer."""
    rows = [row(number % 7) for number in range(700)]
    return write(folder / "dapo-math-17k.parquet", [*rows, row(3, answer="5")])


def aime_file(folder: Path) -> str:
    """3 problems 32 times; one of them is in the training data as well."""
    rows = [row(number, index=number, raw_problem="x", split=None) for number in (100, 101, 5) for _ in range(32)]
    return write(folder / "aime-2024.parquet", rows, AIME_SCHEMA)


def test_each_problem_counts_once_and_none_of_validation_trains(tmp_path: Path) -> None:
    problem_sets = TASK.splits(make_task(train_file=train_file(tmp_path), val_file=aime_file(tmp_path)))
    assert {problem.truth for problem in problem_sets.train} == {"0", "2", "4", "6", "8", "12"}
    assert [problem.truth for problem in problem_sets.val] == ["200", "202", "10"]
    assert problem_sets.train[0].prompt.startswith(BEFORE)
    assert problem_sets.notes == (
        "train: 701 rows, 7 distinct problems: each counts once",
        "train: 1 row repeats a problem with another answer: the first one counts",
        "val: 96 rows, 3 distinct problems: each counts once",
        "train: 1 problem is in the validation data as well and is left out",
        "val: its 3 problems are fewer than `task.val_size`, 512; all are taken",
    )


def test_the_seed_orders_and_holds_out(tmp_path: Path) -> None:
    path = train_file(tmp_path)
    by_seed = [TASK.splits(make_task(train_file=path, seed=seed, val_size=2)) for seed in (0, 0, 1)]
    assert by_seed[0] == by_seed[1] != by_seed[2]
    assert (len(by_seed[0].train), len(by_seed[0].val)) == (5, 2)
    assert not set(by_seed[0].train) & set(by_seed[0].val)


def test_bare_problems_get_the_words_of_the_data_set(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"problem": "What is $1 + 1$?", "answer": " 2 "}) + "\n")
    (problem,) = TASK.first_problems(9, file=path, difficulty=0, seed=0)
    assert problem == Problem(prompt=f"{BEFORE}What is $1 + 1$?{AFTER}", truth="2")


def bad_rows() -> Iterator[tuple[object, str]]:
    good = row(1)
    yield {"problem": "What?"}, "the field `answer` is missing"
    yield {"problem": " ", "answer": "1"}, "the field `problem` is not text, or empty"
    yield {**good, "prompt": "What?"}, "the field `prompt` is not a list of messages"
    yield {**good, "prompt": [{"role": "system", "content": "Be short."}]}, NOT_ONE
    yield {**good, "prompt": [*good["prompt"], *good["prompt"]]}, NOT_ONE  # type: ignore[misc]
    yield {**good, "reward_model": {}}, "the field `reward_model` has no `ground_truth`"
    other = {**good, "reward_model": {"ground_truth": True}}
    why = "is true or false, neither text, a number nor a list of them"
    yield other, f"the field `reward_model.ground_truth` {why}"


NOT_ONE = "the field `prompt` is not one message of the user"


def test_every_bad_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(made) for made, _ in bad_rows()))
    wanted = [(f"{path}:{line}: {message}", HINT) for line, (_, message) in enumerate(bad_rows(), start=1)]
    assert texts(TASK.check_rows(path)) == wanted
    assert texts(replace(TASK, checked_rows=1).check_rows(path)) == wanted[:1]


def test_what_is_no_parquet_is_said(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1, and no more")
    ((message, hint),) = texts(TASK.check_rows(path))
    assert message.startswith(f"{path}: not a parquet file: ")
    assert hint == HINT
    missing = tmp_path / "none.parquet"
    assert texts(TASK.check_rows(missing)) == [(f"{missing}: no such file", NO_FILE.format("parquet"))]


def test_without_the_hub_it_says_what_to_give(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(RecipeError) as caught:
        TASK.splits(make_task())
    ((message, hint),) = caught.value.problems
    words = "task.train_file: no data file is given, and BytedTsinghua-SIA/DAPO-Math-17k cannot be had from the hub: "
    assert message.startswith(words)
    assert hint == "give a file: task.train_file in a recipe, --from with `appliance data`"


def test_a_hub_that_has_it_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What huggingface_hub brings is a file of its cache; the network alone is not the real one here."""
    import huggingface_hub

    files = {dapo_math.TRAIN.file: train_file(tmp_path), dapo_math.VAL.file: aime_file(tmp_path)}
    requests = []

    def download(name: str, file: str, *, repo_type: str) -> str:
        requests.append((name, repo_type))
        return files[file]

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    made = TASK.splits(make_task())
    assert (len(made.train), len(made.val)) == (6, 3)
    assert requests == [(dapo_math.TRAIN.hub, "dataset"), (dapo_math.VAL.hub, "dataset")]


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Answer: 34", "34"),
        ("so\nanswer : $x$ \nmore", "$x$"),
        ("Answer: 1\nAnswer: 2", "2"),
        ("**Answer:** 7", "7"),
        ("it is \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{1} and \\boxed{2}", "1 \\text{ or } 2"),
        ("\\boxed{3", None),
        ("34", None),
        ("", None),
    ],
)
def test_final_answer(response: str, answer: str | None) -> None:
    assert final_answer(response) == answer


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [
        ("Answer: 34", "34", 1.0),
        ("Answer: $34$.", "34", 1.0),
        ("Answer: 034", "34", 1.0),
        ("Answer: 35", "34", 0.0),
        ("Answer: \\frac{2}{4}", "\\frac12", 1.0),
        ("Answer: 0.5", "\\frac{1}{2}", 1.0),
        ("Answer: 1,234", "1234", 1.0),
        ("Answer: $1234$ dollars", "1234", 1.0),
        ("Answer: x = 5", "5", 1.0),
        ("Answer: \\boxed{12}", "12", 1.0),
        ("Answer: (1,2)", "(1, 2)", 1.0),
        ("Answer: 12 or 13", "12", 0.0),
        ("Answer: 1 1/2", "11/2", 0.0),
        ("Answer: 1 1/2", "1", 0.0),
        ("Answer: $-1 1/2$", "-\\frac32", 1.0),
        ("Answer: 1 2", "12", 0.0),
        ("Answer: 1  2", "12", 0.0),
        ("Answer: 1 2", "3", 0.0),
        ("Answer: 1 2", "1  2", 1.0),
        ("Answer: \\frac 1 2", "0.5", 1.0),
        ("Answer: 1 \\frac 12", "3/2", 1.0),
        ("Answer: 12 345 678", "12345678", 1.0),
        ("Answer: 1 000.5 cm", "1000.5", 1.0),
        ("Answer: 1 0000", "10000", 0.0),
        ("Answer: 1 000/3", "1000/3", 1.0),
        ("Answer: 1 234 1/2", "1234.5", 1.0),
        ("Answer: 1 11/2", "13/2", 0.0),
        ("Answer: 10{,}000", "10000", 1.0),
        ("Answer: 10\\!000", "10000", 1.0),
        ("Answer: 10\\,000", "10\\, 000", 1.0),
        ("Answer: \u22125", "-5", 1.0),
        ("Answer: \u20135", "-5", 1.0),
        ("Answer: 1e5", "100000", 1.0),
        ("Answer: 1e5", "1", 0.0),
        ("Answer: \\text{none}", "12", 0.0),
        ("Answer: " + "1" * 301, "1" * 301, 1.0),
        ("Answer: " + "1" * 301, "1" * 302, 0.0),
        ("the answer is 34", "34", 0.0),
        ("", "34", 0.0),
    ],
)
def test_score_compares_mathematics(response: str, truth: str, reward: float) -> None:
    assert score(response=response, truth=truth) == reward


@pytest.mark.parametrize("answer", ["10^{1000000000}", "9^{9^{9^9}}", "((((9!)!)!)!)!", "(" * 290, "1+" * 140 + "1"])
def test_a_wild_answer_takes_no_time(answer: str) -> None:
    started_s = time.process_time()
    assert score(response=f"Answer: {answer}", truth="12") == 0.0
    assert time.process_time() - started_s < 2


@pytest.mark.parametrize("answer", ["2 1/2", "2 1/2.", r"\boxed{2 1/2}."])
def test_a_mixed_number_may_end_a_sentence(answer: str) -> None:
    assert score(response=f"Answer: {answer}", truth="5/2") == 1.0
    assert score(response=f"Answer: {answer}", truth="21/2") < 1.0

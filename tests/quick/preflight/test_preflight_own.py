"""What `check` says of the data of a task of the user's own: the errors of a newcomer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from finding_texts import texts
from plans import HOST

from appliance.plan.build import build_plan
from appliance.preflight.inputs import read_inputs
from appliance.recipe.load import load_recipe
from appliance.tasks import task as tasks
from appliance.tasks.rows import read_file

FIRST = "{cwd}/rows.jsonl:1: the field `{field}` is missing: the row has `question`, `answer` (the same in all 3 rows)"
HINT = "each row is a JSON object with `{}`, text or chat messages, and `{}`"
NO_FILE = "give the path of a {} file; a relative one begins in the folder where the program is started"
ALL_VALIDATED = "task.train_file: {cwd}/rows.jsonl: each of its problems is in the validation data as well"
NONE_LEFT = "none is left to train on: validate on others, or leave that file out and give a size"
WRONG = {
    "a wrong prompt": (["prompt=problem"], FIRST.replace("{field}", "problem"), HINT.format("problem", "answer")),
    "a misspelt prompt": (["prompt=questions"], FIRST.replace("{field}", "questions"), "did you mean `question`?"),
    "a wrong truth": (["truth=solution"], FIRST.replace("{field}", "solution"), HINT.format("question", "solution")),
    "a path of another folder": (
        ["train_file=data/rows.jsonl"],
        "task.train_file: {cwd}/data/rows.jsonl: no such file",
        NO_FILE.format("JSON-lines or parquet"),
    ),
    "no validation file": (
        ["val_file=v.parquet"],
        "task.val_file: {cwd}/v.parquet: no such file",
        NO_FILE.format("parquet"),
    ),
    "no file of a validation set": (
        ["val_sets={a: {file: v.parquet}}"],
        "task.val_sets.a.file: {cwd}/v.parquet: no such file",
        NO_FILE.format("parquet"),
    ),
    "all held out": (
        ["val_size=512"],
        "task.val_size: 512 of the 3 problems in {cwd}/rows.jsonl leave no problem for training or none for validation",
        "use 1 to 2, or give task.val_file",
    ),
    "more than there are": (
        ["val_size=1", "train_size=32"],
        "task.train_size: 32 is more than the 2 problems there are to train on",
        "lower it, or use 0 for all of them",
    ),
    "fewer than a step takes": (
        ["val_size=1"],
        "task.train_file: 2 problems are left to train on, a step takes 32",
        "lower batch.prompts_per_step, or give more problems",
    ),
    "the training file to validate": (["val_file=rows.jsonl"], ALL_VALIDATED, NONE_LEFT),
    "the training file to validate, of several": (["val_sets={a: {file: rows.jsonl}}"], ALL_VALIDATED, NONE_LEFT),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_newcomer_gets_wrong(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{number}+1?", "answer": number + 1} for number in range(3)]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    sets, message, hint = WRONG[name]
    task = ("kind=own", "rewards=[{name: exact}]", "train_file=rows.jsonl", "prompt=question", "truth=answer", *sets)
    recipe = load_recipe("arithmetic-tiny-int8", sets=[f"task.{each}" for each in task])
    plan = build_plan(recipe, run_dir=tmp_path / "runs" / "1", host=HOST)
    assert texts(read_inputs(plan, ask_hub=False).data_faults) == [(message.format(cwd=tmp_path), hint)]


def test_each_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 300,000 rows the second time would cost as much as the first one."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        rows = [{"question": f"{number}+1={name}", "answer": number + 1} for number in range(40)]
        Path(f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = ("train_file=a.jsonl", "val_file=b.jsonl")
    task = ("kind=own", "rewards=[{name: exact}]", *files, "prompt=question", "truth=answer")
    recipe = load_recipe("arithmetic-tiny-int8", sets=[f"task.{each}" for each in task])
    read: list[str] = []
    monkeypatch.setattr(tasks, "read_file", lambda path, **how: read.append(Path(path).name) or read_file(path, **how))
    assert read_inputs(build_plan(recipe, run_dir=tmp_path / "runs" / "1", host=HOST), ask_hub=False).data_faults == ()
    assert read == ["a.jsonl", "b.jsonl"]

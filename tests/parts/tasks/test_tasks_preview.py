"""`appliance data preview`: what the model will really read, by its own tokenizer; and what was left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from called import called
from transformers import PreTrainedTokenizerFast

from appliance import console
from appliance.errors import RecipeError
from appliance.launch import side_job
from appliance.launch.data import DATA_SETS
from appliance.tasks import preview as preview_child
from appliance.tasks.prepare import prompt_ids
from appliance.tasks.response_text import ResponseReader
from appliance.tasks.rows import Problem
from appliance.tasks.tiny_model import byte_tokenizer

ROWS = [
    {"q": "1+2", "a": 3},
    {"q": "1+2", "a": 4},
    {"q": "one and two?", "a": 3},
    {"q": "4+5", "a": 9},
    {"q": "5+5", "a": "10"},
    {"q": "6+5", "a": 11},
]
OWN = (
    *("task.kind=own", "task.rewards=[{name: exact}]", "task.train_file=rows.jsonl", "task.prompt=q", "task.truth=a"),
    *("task.val_size=1", "batch.prompts_per_step=2", "batch.mini_batch_prompts=2", "rollout.samples_per_prompt=4"),
)


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """`appliance data`, and its child, in this process, which has imported transformers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    console.err_console.cache_clear()  # it has read the variable

    def child(module: list[str], *, log: Path, **_: object) -> int:
        log.touch()
        assert module[0] == preview_child.__name__
        return preview_child.main(module[1:])

    monkeypatch.setattr(side_job, "_run", child)

    def run(*arguments: str, sets: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        pairs = [part for pair in sets for part in ("--set", pair)]
        return called("data", *arguments, *pairs, monkeypatch=monkeypatch, capfd=capfd)

    yield run
    console.err_console.cache_clear()


def rows(folder: Path) -> None:
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))


def preview(run: Run, folder: Path, *sets: str, json_mode: bool = False) -> subprocess.CompletedProcess[str]:
    rows(folder)
    more = ("--json",) if json_mode else ()
    return run("preview", "arithmetic-tiny-int8", *more, sets=(*OWN, *sets))


@pytest.mark.slow
def test_two_rows_as_the_model_reads_them_and_what_was_left_out(tmp_path: Path) -> None:
    rows(tmp_path)
    pairs = [part for pair in OWN for part in ("--set", pair)]
    line = [sys.executable, "-m", "appliance", "data", "preview", "arithmetic-tiny-int8", *pairs]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    head, *problems = done.stdout.split("\n\n")
    assert head.splitlines() == [
        "task       own: the field `q`, judged by 1 x exact",
        "problems   3 to train on, 1 to validate",
        "note       train: 6 rows, 5 distinct problems: each counts once",
        "note       train: 1 row repeats a problem with another answer: the first one counts",
        "note       1 of 5 problems have prompts of more than 8 tokens and are left out",
    ]
    assert len(problems) == 2
    assert problems[0].splitlines() == [
        "problem 1  4 tokens of 8",
        "           4+5=",
        "truth      9",
        'row        {"q": "4+5", "a": 9}',
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_preview_as_json(run: Run, tmp_path: Path) -> None:
    document = json.loads(preview(run, tmp_path, json_mode=True).stdout)
    assert (document["train"], document["val"], document["max_prompt_tokens"]) == (3, 1, 8)
    problem = {"prompt": "4+5=", "tokens": 4, "truth": "9", "row": '{"q": "4+5", "a": 9}', "answer": None}
    assert document["problems"][0] == problem


def test_a_row_is_shown_in_its_own_script(run: Run, tmp_path: Path) -> None:
    row = {"q": "4+5", "a": 9, "来源": "小学 \ud800"}
    (tmp_path / "own.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(row | {'q': '5+5'})}\n")
    done = preview(run, tmp_path, "task.train_file=own.jsonl", "task.val_size=1")
    assert done.stdout.splitlines()[-1].endswith('"a": 9, "来源": "小学 \\ud800"}')


def test_a_task_that_is_built_in_has_a_preview(run: Run) -> None:
    done = run("preview", "arithmetic-tiny-int8")
    lines = done.stdout.splitlines()
    assert lines[:2] == [
        "task       arithmetic: a sum of two numbers; 1 for exactly its digits, else 0",
        "problems   1431 to train on, 512 to validate",
    ]
    assert lines[-1] == "row        (none)"


def test_a_bad_row_is_named_and_nothing_is_printed(run: Run, tmp_path: Path) -> None:
    done = preview(run, tmp_path, "task.truth=answer")
    assert (done.returncode, done.stdout) == (2, "")
    first, *_, last = done.stderr.splitlines()
    fact = "the field `answer` is missing: the row has `q`, `a` (the same in all 6 rows)"
    assert first == f"error: {tmp_path}/rows.jsonl:1: {fact}"
    assert last == "hint: each row is a JSON object with `q`, text or chat messages, and `answer`"


def test_prompts_that_are_all_too_long_are_refused(run: Run, tmp_path: Path) -> None:
    done = preview(run, tmp_path, "task.max_prompt_tokens=2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: task.max_prompt_tokens: 2 leaves 0 training and 0 validation problems\nhint: raise it\n"
    )


def test_a_train_size_that_there_is_not_is_refused(run: Run, tmp_path: Path) -> None:
    done = preview(run, tmp_path, "task.train_size=100")
    assert done.stderr == (
        "error: task.train_size: 100 is more than the 3 problems of at most 8 tokens there are to train on\n"
        "hint: lower it, or use 0 for all of them\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("preview",), "Missing argument 'RECIPE'."),
        (("preview", "r.yaml", "-o", "x"), "No such option: -o"),
        (("gsm8k",), "Missing option '--output' / '-o'."),
        (("gsm8k", "r.yaml", "-o", "x"), "Got unexpected extra argument(s) (r.yaml)"),
    ],
)
def test_the_two_forms_of_the_command(run: Run, arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert f"data {arguments[0]} [OPTIONS]" in done.stderr and message in done.stderr


@pytest.mark.parametrize("name", ["nothing", "NAME"])
def test_a_data_set_that_there_is_not(run: Run, name: str) -> None:
    done = run(name, "-o", "x")
    known = "`gsm8k`, `dapo-math-17k`, `aime-2024`"
    assert (done.returncode, done.stderr) == (2, f"error: {name}: no data set has this name\nhint: use {known}\n")


def test_the_help_names_every_data_set(run: Run) -> None:
    text = " ".join(run("--help").stdout.split())
    assert [name for name in DATA_SETS if name not in text] == []


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(max_positions=64)
    tokenizer.chat_template = template
    return tokenizer


SYSTEM = Problem("1 + 2?", "3", before=(("system", "Be short."),))
HINT = "a model without system messages needs task.system null, and none in the rows"


def test_a_chat_template_without_system_messages_says_so() -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    with pytest.raises(RecipeError) as error:
        prompt_ids(SYSTEM, tokenizer=tokenizer_with(template))
    message = "model.path: the model's chat template does not take `1 + 2?` (system, user): System role not supported"
    assert error.value.problems == [(message, HINT)]


def test_a_chat_template_that_drops_the_system_message_says_so() -> None:
    template = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
    with pytest.raises(RecipeError) as error:
        prompt_ids(SYSTEM, tokenizer=tokenizer_with(template))
    message = (
        "model.path: the model's chat template does not take `1 + 2?` (system, user): it leaves out the system message"
    )
    assert error.value.problems == [(message, HINT)]


def test_a_tokenizer_without_a_chat_template_says_so() -> None:
    with pytest.raises(RecipeError) as error:
        prompt_ids(Problem("1 + 2?", "3"), tokenizer=tokenizer_with(None))
    message = "model.path: the model has no chat template: its tokenizer does not say how a prompt is put to it"
    assert error.value.problems == [
        (message, "take an instruct model, or add a chat_template.jinja to the model's folder")
    ]


def test_what_the_prompt_has_begun_of_the_answer_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    made = byte_tokenizer(max_positions=2048)
    made.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    monkeypatch.setattr(preview_child, "load_tokenizer", lambda _: made)
    found = json.loads(preview(run, tmp_path, "task.max_prompt_tokens=30", json_mode=True).stdout)
    assert "prompts end with `<think>`: the text that rewards read begins with it" in found["notes"]
    assert found["problems"][0]["prompt"].endswith("<think>\n")


def test_special_tokens_that_the_model_wrote_are_text_and_its_ends_are_not() -> None:
    """By a tokenizer of transformers, of which `<think>` is a special token."""
    tokenizer = byte_tokenizer(max_positions=2048)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<answer>", "</answer>"]})
    reader, text = ResponseReader(tokenizer), "<think>1+1</think><answer>2</answer>"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == 4 + len("1+1" + "2")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "1+12"
    for behind, finished in (
        (tokenizer.eos_token, True),
        (tokenizer.eos_token + tokenizer.pad_token, False),
        ("", False),
    ):
        assert reader.text([*ids, *tokenizer(behind)["input_ids"]], finished=finished) == text

"""Reward functions in the user's files: three forms, told apart by their parameters, and everything else refused."""

from __future__ import annotations

import json
import py_compile
import sys
from pathlib import Path

import pytest

from appliance.files import digest_of
from appliance.tasks.grading import grade, weigh_rewards
from appliance.tasks.own_task import prompt_and_truth
from appliance.tasks.rows import Row
from appliance.tasks.task import Response, RewardFunction
from appliance.tasks.user_code import FORMS, UserCodeError, load_function

ROW = {"prompt": "1+1?", "answer": 2, "level": "easy"}
CHAT = {**ROW, "prompt": [{"role": "user", "content": "1+1?"}]}
VERL = {
    "data_source": "sums",
    "prompt": CHAT["prompt"],
    "reward_model": {"ground_truth": [2, "two"]},
    "extra_info": {"index": 7},
}


def parts_of_row(row: Row) -> tuple[object, object]:
    return row["prompt"], row["reward_model"]["ground_truth"] if "reward_model" in row else row["answer"]


def value(folder: Path, program: str, *, row: Row = ROW, text: str = "2", name: str = "f") -> object:
    file = folder / "rewards.py"
    file.write_text(program)
    function = load_function(str(file), name, parts_of_row=parts_of_row)
    return function(Response(text, "2", json.dumps(row), token_ids=(50, 7)))


@pytest.mark.parametrize(
    "program",
    [
        "def f(response, truth, *, row): return (response, truth, row) == ('2', '2', ROW)",
        "def f(response, truth): return (response, truth) == ('2', '2')",
        "def f(response): return response == '2'",
        "def f(truth, response, row=None): return row == ROW",
        "def f(response, **others): return others == {'truth': '2', 'row': ROW, 'messages': []}",
        "async def f(response, truth): return response == truth",
    ],
)
def test_ours_gets_what_it_names(tmp_path: Path, program: str) -> None:
    assert value(tmp_path, f"ROW = {ROW}\n{program}") is True


def test_a_function_that_wants_the_conversation_gets_it(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def f(response, *, messages): return [each['role'] for each in messages]")
    function = load_function(str(tmp_path / "rewards.py"), "f", parts_of_row=parts_of_row)
    said = (("user", "1+1?"), ("assistant", "a call"), ("tool", "2"), ("assistant", "2"))
    assert function(Response("2", "2", json.dumps(ROW), messages=said)) == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    "program",
    [
        "def f(prompts, completions, answer): return [float((prompts, completions, answer) == (['1+1?'], ['2'], [2]))]",
        "def f(completions, **columns): return [float(columns == OTHERS)]",
        "def f(completion_ids, **_): return [float(completion_ids == [[50, 7]])]",
        "def f(completions, level, of=1.0): return [of] if level == ['easy'] else [0.0]",
        "def f(completions, **_): return (1.0,)",
        "import numpy\ndef f(completions, **_): return numpy.ones(1)",
        "async def f(prompts, completions): return [float(completions == ['2'])]",
    ],
)
def test_trls_gets_lists_of_one(tmp_path: Path, program: str) -> None:
    others = {"prompts": ["1+1?"], "completion_ids": [[50, 7]], "answer": [2], "level": ["easy"]}
    assert value(tmp_path, f"OTHERS = {others}\n{program}") == 1.0


def test_trls_gets_messages_where_the_row_has_some(tmp_path: Path) -> None:
    program = "seen = []\ndef f(prompts, completions): return [[prompts, completions]]"
    said = [[{"role": "assistant", "content": "2"}]]
    assert value(tmp_path, program, row=CHAT) == [[CHAT["prompt"]], said]


@pytest.mark.parametrize(
    "program",
    [
        "def f(data_source, solution_str, ground_truth, extra_info=None): return float((data_source, solution_str, "
        "ground_truth, extra_info) == ('sums', '2', [2, 'two'], {'index': 7}))",
        "def f(data_source, solution_str, ground_truth, extra_info, **_): return {'score': 1.0, 'acc': True}",
        "def f(solution_str, ground_truth, method='strict'): return 1.0 if method == 'strict' else 0.0",
    ],
)
def test_verls_gets_the_row_of_its_parquet(tmp_path: Path, program: str) -> None:
    assert value(tmp_path, program, row=VERL) == 1.0


@pytest.mark.parametrize(
    "program",
    [
        *("def f(text): pass", "def f(response, reference): pass", "def f(*_): pass", "def f(): pass"),
        *("def f(solution_str, tokenizer): pass", "def f(response, /): pass", "def f(text: str) -> str: pass"),
        "class f:\n    def __init__(self, x): pass",
    ],
)
def test_any_other_is_refused_and_the_three_forms_shown(tmp_path: Path, program: str) -> None:
    with pytest.raises(UserCodeError) as raised:
        value(tmp_path, program)
    takes = "(x)" if "class" in program else program.removeprefix("def f").removesuffix(": pass")
    message = f"{tmp_path}/rewards.py: `f{takes}` is none of the three forms of a reward: {FORMS}"
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("f = 3", "{file}: there is no function `f` in it"),
        ("", "{file}: there is no function `f` in it"),
        ("def f(completions, colour): pass", "{file}: `f` wants `colour`, which the row does not have"),
        ("def f(completions): return [1.0, 2.0]", "`f` returned a list of 2 for one completion, not a list of one"),
        (
            "import numpy\ndef f(completions): return numpy.array(1.0)",
            "`f` returned array(1.) for one completion, not a list of one",
        ),
        ("def f(completions): return []", "`f` returned a list of 0 for one completion, not a list of one"),
        ("def f(completions): return 1.0", "`f` returned 1.0 for one completion, not a list of one"),
        ("def f(completions): return '1'", "`f` returned '1' for one completion, not a list of one"),
        ("def f(solution_str): return {'acc': 1.0}", "`f` returned a mapping without `score`"),
    ],
)
def test_what_is_no_reward_is_refused_by_name(tmp_path: Path, program: str, message: str) -> None:
    with pytest.raises(UserCodeError) as raised:
        value(tmp_path, program)
    assert str(raised.value) == message.format(file=tmp_path / "rewards.py")


@pytest.mark.parametrize("returned", ["'1'", "float('nan')", "[1.0]", "object", "10 ** 400", "b'1'"])
def test_what_is_no_finite_number_is_a_fault_that_names_the_reward(tmp_path: Path, returned: str) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(f"def f(response): return {returned}")
    reward = RewardFunction("mine", 1.0, load_function(str(file), "f", parts_of_row=parts_of_row))
    graded = weigh_rewards(grade((reward,), Response("2", "2")))
    assert graded.fault is not None
    assert graded.why == f"the reward `mine` returned {repr(eval(returned))[:60]}, not a finite number"


def test_a_file_may_hold_a_dataclass_and_is_imported_once(tmp_path: Path) -> None:
    program = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
        "count = 0\ndef f(response):\n    global count\n    count += 1\n    return count"
    )
    assert [value(tmp_path, program), value(tmp_path, program)] == [1, 2]


def test_the_prompt_of_another_trainers_function_is_what_the_row_has() -> None:
    from plans import make_own_task

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    assert prompt_and_truth(ROW, settings=make_own_task(truth="answer")) == ("1+1?", 2)
    assert prompt_and_truth(ROW, settings=make_own_task(template="Q: {answer}", system="Be brief.")) == ("Q: 2", None)
    assert prompt_and_truth(CHAT, settings=make_own_task(system="Be brief.")) == (messages, None)
    assert prompt_and_truth(VERL, settings=make_own_task()) == (VERL["prompt"], [2, "two"])


def test_only_the_file_that_was_planned_runs(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("def f(response): return 1.0")
    planned = digest_of(file)
    assert load_function(str(file), "f", parts_of_row=parts_of_row, sha256=planned)(Response("2", "2")) == 1.0
    sys.modules.pop(f"_user_code_{file}")  # as another process has it
    file.write_text("def f(response): return 2.0")
    with pytest.raises(UserCodeError) as raised:
        load_function(str(file), "f", parts_of_row=parts_of_row, sha256=planned)
    assert str(raised.value) == f"{file}: it is not the file that was planned: it has changed since"


def test_what_somebody_compiled_does_not_run_in_its_place(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("def f(response): return 2.0")
    py_compile.compile(str(file), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    file.write_text("def f(response): return 1.0")
    assert load_function(str(file), "f", parts_of_row=parts_of_row)(Response("2", "2")) == 1.0


def test_a_file_is_compiled_by_its_own_future_imports_and_encoding(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    program = "# coding: latin-1\ndef f(response: int): return 'é' + f.__annotations__['response'].__name__"
    file.write_bytes(program.encode("latin-1"))
    assert load_function(str(file), "f", parts_of_row=parts_of_row)(Response("2", "2")) == "éint"

"""A task of the user's own: rows of every form become problems, and a bad row is named by file, line and field."""

from __future__ import annotations

import datetime
import decimal
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from finding_texts import texts
from plans import make_files, make_own_task, make_reward, make_task
from three_forms import REWARDS, data_of

from appliance.errors import RecipeError
from appliance.files import digest_of
from appliance.record.plan import CodeFile
from appliance.settings.sections import Reward, Task
from appliance.tasks import own_task
from appliance.tasks.built_in import arithmetic
from appliance.tasks.grading import grade
from appliance.tasks.library import data_key
from appliance.tasks.own_task import parse_row, prompt_and_truth, template_parts
from appliance.tasks.rows import MAX_ROW, Problem, ProblemSet, read_file
from appliance.tasks.task import Response

EXACT = make_reward("exact")
OF_A_FILE = make_reward("f", file="/a/rewards.py")
SAID = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1 + 2?"}]


def settings_of(rewards: tuple[Reward, ...] = (EXACT,), **given: Any) -> Task:
    return make_own_task(*rewards, **given)


def read(path: Path, *rows: object, **given: Any) -> ProblemSet:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return read_parts(path, **given)


def read_parts(path: Path, **given: Any) -> ProblemSet:
    source = own_task.task(settings_of(**given), files=make_files()).source
    assert source is not None
    return read_file(path, source=source, name=path.name)


def fault_of(path: Path, *rows: object, **given: Any) -> str:
    ((message, hint),) = texts(read(path, *rows, **given).faults)
    assert hint
    return message


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "own.jsonl"


def test_text_and_truth_come_from_the_named_fields(file: Path) -> None:
    row = {"question": "1 + 2?", "meta": {"answer": "3"}, "id": 7}
    (problem,) = read(file, row, prompt="question", truth="meta.answer").problems
    assert problem == Problem("1 + 2?", "3", (), json.dumps(row))


@pytest.mark.parametrize("truth", [132, "132"])
def test_a_number_is_the_same_truth_as_its_text(file: Path, truth: object) -> None:
    (problem,) = read(file, {"prompt": "1?", "answer": truth}, truth="answer").problems
    assert problem.truth == "132"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *(("0.00001", "0.00001"), ("1e16", "10000000000000000"), ("1.5e-7", "0.00000015"), ("132.0", "132")),
        *(("-2.50", "-2.5"), ("-0.0", "0"), ("1e23", "1" + "0" * 23), ("123456789012345680.0", "123456789012345680")),
    ],
)
def test_a_number_is_its_digits_without_an_exponent(file: Path, number: str, text: str) -> None:
    row = f'{{"q": {number}, "answer": {number}}}'
    (problem,) = read(file, row, template="{q}", truth="answer").problems
    assert (problem.prompt, problem.truth) == (text, text)


def test_a_column_of_decimal_numbers_has_digits_too(tmp_path: Path) -> None:
    numbers = pa.array([decimal.Decimal("0.0000001"), decimal.Decimal("0")], pa.decimal128(10, 7))
    pq.write_table(pa.table({"prompt": ["1?", "2?"], "a": numbers}), tmp_path / "rows.parquet")
    found = read_parts(tmp_path / "rows.parquet", truth="a").problems
    assert [each.truth for each in found] == ["0.0000001", "0.0000000"]


def test_numbers_and_texts_may_stand_in_one_file(file: Path) -> None:
    found = read(file, {"prompt": "1?", "answer": 1}, {"prompt": "2?", "answer": "2"}, truth="answer")
    assert ([each.truth for each in found.problems], found.faults) == (["1", "2"], [])


def test_byte_order_marks_line_ends_of_windows_and_empty_lines_are_no_part_of_rows(file: Path) -> None:
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "1?"}\r\n\r\n \r\n\xef\xbb\xbf{"prompt": "2?"}\r\n\xef\xbb\xbf')
    found = read_parts(file)
    assert ([each.prompt for each in found.problems], found.rows, found.faults) == (["1?", "2?"], 2, [])


def test_chat_messages_keep_what_was_said_before(file: Path) -> None:
    (problem,) = read(file, {"prompt": SAID}).problems
    assert (problem.prompt, problem.before) == ("1 + 2?", (("system", "Be short."),))


def test_a_system_message_comes_first(file: Path) -> None:
    (problem,) = read(file, {"prompt": "1 + 2?"}, system="Be short.").problems
    assert problem.messages == (("system", "Be short."), ("user", "1 + 2?"))


def test_a_template_has_fields_dotted_fields_and_braces(file: Path) -> None:
    row = {"q": "1 + 2?", "meta": {"choices": ["3", "é"], "n": 2}}
    template = "{q}\n{meta.n}: {meta.choices} in \\boxed{{}}"
    (problem,) = read(file, row, template=template).problems
    assert problem.prompt == '1 + 2?\n2: ["3", "é"] in \\boxed{}'


def test_a_field_whose_name_has_a_dot_comes_before_a_path(file: Path) -> None:
    (problem,) = read(file, {"a.b": "whole", "a": {"b": "path"}}, prompt="a.b").problems
    assert problem.prompt == "whole"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{}", "`{}` names no field"),
        ("\\boxed{3}", None),
        ("{a!r}", "`{a!r}` names no field"),
        ("{a:>9}", "`{a:>9}` names no field"),
        ("{a[0]}", "`{a[0]}` names no field"),
        ("{a:{b}}", "`{a:{b}}` names no field"),
        ("{a b}", "`{a b}` names no field"),
        ("{a", "expected '}' before end of string"),
        ("a}", "Single '}' encountered in format string"),
    ],
)
def test_only_fields_stand_between_braces(template: str, why: str | None) -> None:
    if why is None:
        assert template_parts(template) == [("\\boxed", "3")]
        return
    with pytest.raises(ValueError) as error:
        template_parts(template)
    assert str(error.value) == why


def test_a_template_reads_no_attribute_of_a_value(file: Path) -> None:
    message = fault_of(file, {"q": "x"}, template="{q.__class__}")
    assert message == "own.jsonl:1: the field `q.__class__` of task.template is missing: the row has `q`"


BAD: dict[str, tuple[Any, dict[str, str], str]] = {
    "no prompt": ({"question": "1?", "a": 1}, {}, "the field `prompt` is missing: the row has `question`, `a`"),
    "no field at all": ({}, {}, "the field `prompt` is missing: the row is empty"),
    "no truth": ({"prompt": "1?"}, {"truth": "a.b"}, "the field `a.b` is missing: the row has `prompt`"),
    "null truth": ({"prompt": "1?", "a": None}, {"truth": "a"}, "the field `a` is null"),
    "no number as truth": ({"prompt": "1?", "a": float("nan")}, {"truth": "a"}, "the field `a` is NaN"),
    "an endless truth": ('{"prompt": "1?", "a": -1e999}', {"truth": "a"}, "the field `a` is -Infinity"),
    "a blank truth": (
        {"prompt": "1?", "a": " "},
        {"truth": "a"},
        "the field `a` is empty, and the reward `exact` reads it",
    ),
    "empty": ({"prompt": " "}, {}, "the field `prompt` is empty"),
    "a number": ({"prompt": 3}, {}, "the field `prompt` is a number, neither text nor a list of chat messages"),
    "no messages": ({"prompt": []}, {}, "the field `prompt` has no messages"),
    "no message": (
        {"prompt": ["hello"]},
        {},
        "message 1 of the field `prompt` is text, not an object with `role` and `content`",
    ),
    "no role": (
        {"prompt": [{"content": "1?"}]},
        {},
        "message 1 of the field `prompt` has no `role`, and a prompt is made of system, user, assistant",
    ),
    "a tool": (
        {"prompt": [*SAID, {"role": "tool", "content": "3"}]},
        {},
        "message 3 of the field `prompt` has the role tool, and a prompt is made of system, user, assistant",
    ),
    "no text": (
        {"prompt": [{"role": "user", "content": None}]},
        {},
        "message 1 of the field `prompt` has no text as `content`",
    ),
    "an answer last": (
        {"prompt": [*SAID, {"role": "assistant", "content": "3"}]},
        {},
        "the last message of the field `prompt` is not the user's",
    ),
    "two system messages": (
        {"prompt": SAID},
        {"system": "Think."},
        "the field `prompt` begins with a system message, and task.system gives another",
    ),
    "null in a template": ({"q": None}, {"template": "{q}"}, "the field `q` of task.template is null"),
    "no number in a template": ({"q": float("nan")}, {"template": "{q}"}, "the field `q` of task.template is NaN"),
    "an empty template": ({"q": " "}, {"template": "{q}"}, "task.template makes an empty prompt of this row"),
    "half a character": (
        '{"prompt": "1 \\ud800"}',
        {},
        "half a character, such as `\\ud800`, which no tokenizer can read",
    ),
    "half of a truth": (
        '{"prompt": "1?", "a": ["\\udc00"]}',
        {"truth": "a"},
        "half a character, such as `\\ud800`, which no tokenizer can read",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named(file: Path, name: str) -> None:
    row, given, why = BAD[name]
    assert fault_of(file, row, **given) == f"own.jsonl:1: {why}"


def test_a_truth_may_be_blank_where_no_built_in_reward_reads_it(file: Path) -> None:
    rewards = (
        *(make_reward("format"), make_reward("length", target=9), make_reward("judge", url="http://a", model="m")),
        *(make_reward("exact", file="/a/rewards.py"), make_reward("regex", pattern="x")),
    )
    row = {"prompt": "1?", "a": ""}
    (problem,) = read(file, row, truth="a", rewards=rewards).problems
    assert problem.truth == ""
    message = fault_of(file, row, truth="a", rewards=(*rewards, make_reward("regex")))
    assert message == "own.jsonl:1: the field `a` is empty, and the reward `regex-2` reads it"


def test_tests_of_code_that_are_no_lists_are_refused_by_their_row(file: Path) -> None:
    rows = [{"prompt": f"{each}?", "a": {"inputs": each, "outputs": each}} for each in (["1"], "1")]
    message = fault_of(file, *rows, truth="a", rewards=(make_reward("code"),))
    why = '`inputs` is `"1"`, but must be a list with an entry for each test'
    assert message == f"own.jsonl:2: the field `a`: {why}"


@pytest.mark.parametrize(
    ("value", "truth"),
    [
        (["0", "1"], '["0", "1"]'),
        ([0, 1.0, 0.5, "é"], '["0", "1", "0.5", "é"]'),
        ("[0, 1]", "[0, 1]"),
        (["[0, 1]"], '["[0, 1]"]'),
    ],
)
def test_a_list_in_the_data_is_any_of_its_members(file: Path, value: object, truth: str) -> None:
    rows = ({"prompt": "1?", "a": value}, {"prompt": "2?", "a": "5"}, {"prompt": "3?", "a": 5})
    problems = read(file, *rows, truth="a").problems
    assert [problem.truth for problem in problems] == [truth, "5", "5"]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (True, "is true or false, neither text, a number nor a list of them"),
        ({"target": 98}, "is an object, neither text, a number nor a list of them"),
        ([], "is an empty list"),
        ([[1], 2], "is a list, and its member 1 is a list, neither text nor a number"),
        (["1", None], "is a list, and its member 2 is null, neither text nor a number"),
        ([1, float("nan")], "is a list, and its member 2 is NaN, neither text nor a number"),
        ([False], "is a list, and its member 1 is true or false, neither text nor a number"),
        ([{"a": 1}], "is a list, and its member 1 is an object, neither text nor a number"),
        (["1", " "], "is a list, and its member 2 is empty"),
    ],
)
@pytest.mark.parametrize("name", ["exact", "math", "number", "choice", "regex"])
def test_what_is_no_answer_is_refused_where_a_built_in_reward_reads_it(
    file: Path, value: object, why: str, name: str
) -> None:
    rewards = (OF_A_FILE, make_reward(name))
    message = fault_of(file, {"prompt": "1?", "a": value}, truth="a", rewards=rewards)
    assert message == f"own.jsonl:1: the field `a` {why}, and the reward `{name}` reads it"


@pytest.mark.parametrize("value", [True, {"target": 98}, [], [[1], None], [0, 1], [{"a": 1}]])
def test_a_function_of_the_users_gets_the_json_that_the_row_has(file: Path, value: object) -> None:
    rewards = (OF_A_FILE, make_reward("format"), make_reward("judge", url="http://a", model="m"))
    (problem,) = read(file, {"prompt": "1?", "a": value}, truth="a", rewards=rewards).problems
    assert json.loads(problem.truth) == value


@pytest.mark.parametrize("value", [["1", "2"], [1, 2], 1.0, [0.1]])
def test_verls_truth_may_be_a_list_or_a_number(tmp_path: Path, value: object) -> None:
    rows = [{"prompt": SAID, "reward_model": {"style": "rule", "ground_truth": value}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = read_parts(tmp_path / "rows.parquet")
    truth = {"1.0": "1", "[0.1]": '["0.1"]'}.get(str(value), '["1", "2"]')
    assert ([problem.truth for problem in found.problems], found.faults) == ([truth], [])


NARROW = {
    "float32": (pa.array([0.1, 16777216.0, 1e-7], pa.float32()), [0.1, 16777216.0, 1e-7]),
    "float16": (pa.array([0.1, 2048.0, None], pa.float16()), [0.1, 2048.0, None]),
    "no number": (pa.array([0.1, float("inf"), None], pa.float32()), [0.1, float("inf"), None]),
    "float64": (pa.array([0.1, 0.10000000149011612, 1e-7]), [0.1, 0.10000000149011612, 1e-7]),
    "category": (pa.array([0.1, 0.2, 0.1], pa.float32()).dictionary_encode(), [0.1, 0.2, 0.1]),
    "text category": (pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
    "list": (pa.array([[0.1], [], None], pa.list_(pa.float32())), [[0.1], [], None]),
    "large list": (pa.array([[0.1], [], None], pa.large_list(pa.float32())), [[0.1], [], None]),
    "list of two": (pa.array([[0.1, 0.2]] * 3, pa.list_(pa.float32(), 2)), [[0.1, 0.2]] * 3),
    "list of halves": (pa.array([[0.1, None], [], None], pa.list_(pa.float16())), [[0.1, None], [], None]),
    "struct": (
        pa.array(
            [{"a": 0.1, "b": [{"c": 0.3}]}] * 3,
            pa.struct([("a", pa.float16()), ("b", pa.list_(pa.struct([("c", pa.float32())])))]),
        ),
        [{"a": 0.1, "b": [{"c": 0.3}]}] * 3,
    ),
    "map": (pa.array([[("a", 0.1)]] * 3, pa.map_(pa.string(), pa.float32())), [{"a": 0.1}] * 3),
    "map of halves": (pa.array([[("a", 0.1)]] * 3, pa.map_(pa.string(), pa.float16())), [{"a": 0.1}] * 3),
    "decimal": (pa.array([decimal.Decimal("0.10")] * 3, pa.decimal128(5, 2)), ["0.10"] * 3),
}


@pytest.mark.parametrize("name", NARROW)
def test_a_column_of_narrow_numbers_prints_as_its_own_type_does(tmp_path: Path, name: str) -> None:
    column, values = NARROW[name]
    pq.write_table(pa.table({"prompt": ["1?", "2?", "3?"], "a": column}), tmp_path / "rows.parquet")
    found = read_parts(tmp_path / "rows.parquet")
    assert (found.faults, found.left_out) == ([], ())
    assert [json.loads(problem.row)["a"] for problem in found.problems] == values


def test_a_truth_of_a_narrow_column_is_its_shortest_decimal(tmp_path: Path) -> None:
    for kind in (pa.float16(), pa.float32()):
        pq.write_table(pa.table({"prompt": ["1?"], "a": pa.array([0.1], kind)}), tmp_path / "rows.parquet")
        (problem,) = read_parts(tmp_path / "rows.parquet", truth="a").problems
        assert (problem.truth, json.loads(problem.row)["a"]) == ("0.1", 0.1)


def test_a_missing_field_in_row_812(file: Path) -> None:
    rows = [{"prompt": f"{number}?", "answer": number} for number in range(1000)]
    del rows[811]["answer"]
    message = fault_of(file, *rows, truth="answer")
    assert message == "own.jsonl:812: the field `answer` is missing: the row has `prompt`"


def test_truths_of_two_kinds_are_refused(file: Path) -> None:
    rows = ({"prompt": "1?", "a": "1"}, {"prompt": "2?", "a": {"b": "2"}})
    message = fault_of(file, *rows, truth="a", rewards=(OF_A_FILE,))
    assert message == "own.jsonl:2: its truth is an object, but in the rows before it text, a number or a list"


@pytest.mark.parametrize("rewards", [(OF_A_FILE,), (OF_A_FILE, make_reward("exact"))])
def test_one_answer_and_several_may_be_in_a_file(file: Path, rewards: tuple[Reward, ...]) -> None:
    rows = ({"prompt": "1?", "a": ["2", "two"]}, {"prompt": "2?", "a": "3"}, {"prompt": "3?", "a": 4})
    problems = read(file, *rows, truth="a", rewards=rewards).problems
    assert [problem.truth for problem in problems] == ['["2", "two"]', "3", "4"]


@pytest.mark.parametrize(
    ("path", "value", "hint"),
    [
        ("a", True, 'write it as text, such as "True", or '),
        ("a", {"target": 98, "numbers": [1]}, "name an inner field, such as `a.target`, or "),
        ("a", {"x": None, "y": {"z": "98"}}, "name an inner field, such as `a.y.z`, or "),
        ("", {"target": 98}, "name an inner field, such as `reward_model.ground_truth.target`, or "),
        ("a", {"numbers": [1]}, "name a field that has the answer, or "),
        ("a", ["1", None], "a list has right answers, each of them text or a number: correct it, or "),
    ],
)
def test_the_hint_is_against_the_fault_of_the_truth(file: Path, path: str, value: object, hint: str) -> None:
    row = {"prompt": "1?", "a": value} if path else {"prompt": "1?", "reward_model": {"ground_truth": value}}
    ((_, found),) = texts(read(file, row, truth=path or None).faults)
    assert found == f"{hint}judge it with functions of your own alone"


def test_ten_megabytes_in_one_row_are_refused_with_their_field(file: Path) -> None:
    message = fault_of(file, {"prompt": "1?", "tests": "x" * 10_000_000})
    assert message == "own.jsonl:1: 10.0 MB, most of them in the field `tests`: a row has at most 8 MiB"
    assert MAX_ROW == 8 << 20


def test_an_empty_file(file: Path) -> None:
    assert fault_of(file) == "own.jsonl: the file has no rows"


def test_half_a_character_elsewhere_reaches_a_reward_as_json(file: Path) -> None:
    (problem,) = read(file, '{"prompt": "1?", "note": "\\ud800"}').problems
    assert problem.row == '{"prompt": "1?", "note": "\\ud800"}'


def test_verls_parquet_is_taken_unchanged(tmp_path: Path) -> None:
    row = {
        "data_source": "mine",
        "prompt": SAID,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": {"answer": [3, 4], "unit": None}},
        "extra_info": {"split": "train", "index": 5},
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "TRAIN.PARQUET")
    (problem,) = read_parts(tmp_path / "TRAIN.PARQUET", rewards=(OF_A_FILE,)).problems
    assert problem.messages == (("system", "Be short."), ("user", "1 + 2?"))
    assert json.loads(problem.truth) == {"answer": [3, 4], "unit": None}
    assert json.loads(problem.row) == row


def test_columns_of_every_type_are_json_or_left_out(tmp_path: Path) -> None:
    day = datetime.datetime(2026, 11, 23, 12, 30)
    columns = {
        "prompt": ["1?", "2?"],
        "when": [day, None],
        "nanoseconds": pa.array([1, 2], pa.timestamp("ns")),
        "money": [decimal.Decimal("1.50"), decimal.Decimal("2")],
        "half": pa.array([0.5, None], pa.float16()),
        "none": [float("nan"), 1.0],
        "byte": pa.array([1, 2], pa.int8()),
        "tags": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int32())),
        "kind": pa.array(["x", "y"]).dictionary_encode(),
        "image": [{"bytes": b"\xff\x00", "path": "a.png"}, None],
        "raw": [b"\x00", b"\x01"],
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    found = read_parts(tmp_path / "rows.parquet")
    assert (found.faults, found.left_out) == ([], ("image", "raw"))
    first = json.loads(found.problems[0].row)
    assert str(first.pop("none")) == "nan"
    assert first == {
        "prompt": "1?",
        "when": "2026-11-23T12:30:00",
        "nanoseconds": "1970-01-01T00:00:00.000000001",
        "money": "1.50",
        "half": 0.5,
        "byte": 1,
        "tags": {"a": 1},
        "kind": "x",
    }


def test_what_was_left_out_is_told(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["1?", "2?", "3?"], "raw": [b"", b"", b""]}), tmp_path / "rows.parquet")
    made = splits(tmp_path / "rows.parquet", val_size=1)
    assert made.notes == ("train: `raw`: not in the rows that rewards get, bytes are no JSON",)


def splits(path: Path, *, val_size: int, seed: int = 0, train_size: int = 0, **given: str) -> Any:
    task = own_task.task(settings_of(**given), files=make_files())
    return task.splits(make_task(train_file=str(path), seed=seed, train_size=train_size, val_size=val_size))


def test_what_is_held_out_does_not_depend_on_the_order_of_rows(file: Path) -> None:
    rows = [{"prompt": f"{number}?"} for number in range(50)]
    read(file, *rows)
    in_order = splits(file, val_size=9).val
    read(file, *random.Random(3).sample(rows, 50))
    other = splits(file, val_size=9).val
    assert [each.prompt for each in in_order] == [each.prompt for each in other]


def test_more_held_out_than_there_are_is_refused(file: Path) -> None:
    read(file, {"prompt": "1?"}, {"prompt": "2?"})
    with pytest.raises(RecipeError) as error:
        splits(file, val_size=512)
    message = f"task.val_size: 512 of the 2 problems in {file} leave no problem for training or none for validation"
    assert error.value.problems == [(message, "use 1 to 1, or give task.val_file")]


def test_of_a_single_problem_none_can_be_held_out(file: Path) -> None:
    read(file, {"prompt": "1?"})
    with pytest.raises(RecipeError) as error:
        splits(file, val_size=1)
    message = f"task.val_size: 1 of the 1 problem in {file} leave no problem for training or none for validation"
    assert error.value.problems == [(message, "give more problems, or give task.val_file")]


def test_the_examples_problems_are_unseen_by_the_warm_start_and_by_each_other() -> None:
    folder = Path(__file__).parents[3] / "examples" / "own-task"
    pools = {}
    for name in ("problems", "unseen"):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        assert all(sum_of(row["question"]) == row["answer"] for row in rows)
        pools[name] = {arithmetic.pool_of(*map(int, row["question"].split("+"))) for row in rows}
    assert pools == {"problems": {arithmetic.Pool.TRAIN}, "unseen": {arithmetic.Pool.VALIDATION}}


def sum_of(question: str) -> str:
    return str(sum(map(int, question.split("+"))))


def test_three_forms_of_one_task_are_the_same_problems_and_grades(tmp_path: Path) -> None:
    seen = {}
    for form, code in REWARDS.items():
        file = tmp_path / f"{form}.py"
        file.write_text(code)
        files = (CodeFile(path=str(file), copy_name=file.name, sha256=digest_of(file)),)
        given = {key: value for key, value in data_of(form, tmp_path).items() if value != "null"}
        train_file, reward = given.pop("train_file"), make_reward("right_sum", file=file)
        task = own_task.task(settings_of(rewards=(reward,), **given), files=make_files(*files))
        problem_sets = task.splits(make_task(train_file=str(tmp_path / train_file), val_size=64))
        rewards = task.rewards()
        seen[form] = [
            (
                problem.messages,
                [grade(rewards, Response(said, problem.truth, problem.row)) for said in ("119", " 119\n", "")],
            )
            for problem in (*problem_sets.train, *problem_sets.val)
        ]
    assert len(seen["ours"]) == 1200 and any(grades[0][0][2] == 1.0 for _, grades in seen["ours"])
    assert seen["trls"] == seen["ours"]
    assert seen["verls"] == seen["ours"]


def test_a_row_that_was_taken_is_given_whatever_rewards_came_since() -> None:
    """Problems without a truth, made for a function of the user's; then a built-in reward that reads it is added."""
    row, alone = {"question": "q", "answer": " "}, settings_of(prompt="question", truth="answer", rewards=())
    added = alone.replace(rewards=(EXACT,))
    assert isinstance(parse_row(row, settings=alone), Problem) and isinstance(parse_row(row, settings=added), str)
    assert prompt_and_truth(row, settings=added) == ("q", " ")
    keys = {data_key(settings, files=make_files(), model="m") for settings in (alone, added)}
    assert len(keys) == 2, "so that its problems are made anew, and refused"

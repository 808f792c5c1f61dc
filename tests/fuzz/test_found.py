"""What the fuzz has found, a test each: every one of these ended with a traceback, a hang or all of the memory."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from fuzz_surface import attempt

from appliance import cli, console
from appliance.errors import EngineError, RecipeError
from appliance.finding import fault
from appliance.quant.files import read_file_header, tensor_shapes
from appliance.recipe import library
from appliance.recipe.load import load_recipe
from appliance.recipe.text import full_path, parse
from appliance.record.events import first_failure, parse_event, parse_metrics
from appliance.record.session import read_record
from appliance.tasks.answers import marked_answer
from appliance.tasks.built_in import dapo_math, gsm8k
from appliance.terms.shapes import read_shape
from flashrl_compat import unpickle
from flashrl_compat.variables import read_variables


def refused(text: str, room: Path) -> list[str]:
    (room / "r.yaml").write_text(f"extends: arithmetic-tiny-int8\n{text}\n")
    with pytest.raises(RecipeError) as raised:
        load_recipe(str(room / "r.yaml"))
    return [message.removeprefix(f"{room}/r.yaml:") for message, _ in raised.value.problems]


@pytest.mark.parametrize("text", ['a: "\\U00110000"', 'a: "\\UFFFFFFFF"', "%YAML 1." + "9" * 5000 + "\n---\na: 1"])
def test_an_escape_that_is_no_character(text: str) -> None:
    root, problems = parse(text.encode(), file="r.yaml")
    assert root is None
    assert [finding.fact for finding in problems] == ["r.yaml: not YAML: an escape that stands for no character"]


@pytest.mark.parametrize(
    ("escape", "code"), [("\\x00", "0000"), ("\\e", "001B"), ("\\n", "000A"), ("\\x85", "0085"), ("\\ud800", "D800")]
)
def test_a_control_character_in_a_value_or_a_key(room: Path, escape: str, code: str) -> None:
    assert refused(f'name: "a{escape}"', room)[0] == f"2: name: the control character U+{code} is not allowed"
    assert refused(f'"a{escape}": 1', room)[0] == f"2: a key with the control character U+{code}"


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("a{99999999999999}", "the repetition number is too large"),
        ("(" * 3000, "more than 200 characters"),
        ("(", "missing ), unterminated subpattern at position 0"),
    ],
)
def test_a_pattern_that_re_cannot_take(room: Path, pattern: str, why: str) -> None:
    found = refused(f"quantization: {{ignore: ['re:{pattern}']}}", room)
    assert found == [f"2: quantization.ignore: `{('re:' + pattern)[:60]}` is not a regular expression: {why}"]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("~nobody-here/x", "`~nobody-here` is nobody's home on this host"),
        ("x" * 256, "a path has at most 1024 bytes, and 255 in each of its names"),
        ("x/" * 600, "a path has at most 1024 bytes, and 255 in each of its names"),
    ],
)
def test_a_path_that_cannot_be(room: Path, path: str, why: str) -> None:
    for key in ("cluster.run_dir", "cluster.token_file", "quantization.profile"):
        section, _, name = key.partition(".")
        assert f"2: {key}: {why}" in refused(f"{section}: {{{name}: {path}}}", room)


@pytest.mark.parametrize("name", ["x" * 300, "a\x00b", "x/" * 3000, "\ud800"])
def test_a_name_of_a_recipe_that_cannot_be(name: str) -> None:
    with pytest.raises(RecipeError):
        library.find(name)


def test_a_key_of_thousands_of_levels() -> None:
    with pytest.raises(RecipeError, match="more than 8 levels deep"):
        load_recipe("arithmetic-tiny-int8", sets=("a." * 3000 + "b=1",))


def test_a_cluster_larger_than_any(room: Path) -> None:
    found = refused("cluster: {nodes: 1000000000, gpus_per_node: 1000000000, run_dir: x}", room)
    assert "2: cluster.nodes: must be at most 1024, got `1000000000`" in found
    assert "2: cluster.gpus_per_node: must be at most 64, got `1000000000`" in found


def test_sizes_that_a_ladder_would_climb_for_ever(room: Path) -> None:
    assert refused("rollout: {kv_cache_gb: 1000000000}", room) == [
        "2: rollout.kv_cache_gb: must be at most 1024, got `1000000000`"
    ]
    assert refused("batch: {micro_batch_sequences: 1000000000}", room) == [
        "2: batch.micro_batch_sequences: must be at most 65536, got `1000000000`"
    ]


def test_an_option_with_half_a_character() -> None:
    for half in ("\ud800", "\udcff"):
        with pytest.raises(RecipeError, match="not UTF-8 text"):
            load_recipe("arithmetic-tiny-int8", sets=(f"name={half}",))


def test_a_pickle_that_is_cut_in_a_number(room: Path) -> None:
    (room / "profile.pt").write_bytes(b"J\x00")
    with (room / "profile.pt").open("rb") as file, pytest.raises(unpickle.NotAProfile, match="torch cannot read it"):
        unpickle.read(file)


def test_thousands_of_problems_are_told_in_a_moment(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "{" + ",".join(f"k{number}: 1" for number in range(4000)) + "}"
    (room / "r.yaml").write_text(
        f"extends: arithmetic-tiny-int8\nguard: {text}\nrollout: {{replicas: [{'x,' * 4000}]}}\n"
    )

    def report_problems() -> None:
        try:
            load_recipe(str(room / "r.yaml"))
        except RecipeError as error:
            cli._report(error)
            raise

    cli._report(RecipeError([fault((), "")]))  # what rich imports at its first use
    assert attempt("recipe text", report_problems, folder=room) is None
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) < 2 * 20 + 4
    assert lines[-1] == f"error: and {2 * 4000 - 20} more"


def test_a_number_of_thousands_of_digits_in_a_row(room: Path) -> None:
    (room / "d.jsonl").write_text('{"question": ' + "1" * 5000 + "}\n")
    assert (
        gsm8k.TASK.check_rows(room / "d.jsonl")[0].fact
        == f"{room}/d.jsonl:1: not JSON: a number of thousands of digits"
    )


def test_a_number_with_two_signs_in_a_row(room: Path) -> None:
    (room / "d.jsonl").write_text('{"question": "1 + 2?", "answer": "####--0"}\n')
    found = gsm8k.TASK.check_rows(room / "d.jsonl")[0].fact
    assert found == f"{room}/d.jsonl:1: the field `answer` has no number after `####`"


@pytest.mark.parametrize(("mark", "answer"), [("####", None), ("Answer: ", "x")])
def test_a_response_of_nothing_but_marks(mark: str, answer: str | None) -> None:
    assert marked_answer(mark * 3000 + "x") == answer  # more than four # in a row are a heading


def test_tags_that_nothing_closes_are_read_once() -> None:
    began, text = time.process_time(), "<answer>7</answer>" + "<answer>" * 40_000
    assert marked_answer(text) == "7"  # quadratic where each tag is read to the end
    assert time.process_time() - began < 5


def test_half_a_character_in_a_row(room: Path) -> None:
    row = {"question": "1 + 2?", "answer": "#### 3"}
    (room / "d.jsonl").write_text(json.dumps(row | {"question": "\ud800"}) + "\n")
    found = gsm8k.TASK.check_rows(room / "d.jsonl")[0].fact
    assert found == f"{room}/d.jsonl:1: half a character, such as `\\ud800`, which no tokenizer can read"
    (room / "d.jsonl").write_text(json.dumps({"problem": "1 + 2?", "answer": "\udfff"}) + "\n")
    assert "half a character" in dapo_math.TASK.check_rows(room / "d.jsonl")[0].fact


def test_events_and_metrics_that_are_none() -> None:
    deep, large = "[" * 100_000, "1" + "0" * 400
    assert parse_event(deep) is None and parse_metrics(deep) is None
    assert parse_event(f'{{"time": {large}, "kind": "note", "what": "x"}}') is None
    assert parse_metrics(f'{{"step": {large}, "time_s": 1}}') is None


def test_events_that_are_no_text(room: Path) -> None:
    (room / "events.jsonl").write_bytes(b'\xf5\x7f\n{"time": 1, "kind": "failure", "what": "x"}\n')
    assert first_failure(room).what == "x"


@pytest.mark.parametrize("change", [{"phase": 1}, {"reason": None}, {"exit_code": "5"}, {"exit_code": 10**30}])
def test_a_record_of_another_kind(room: Path, change: dict) -> None:
    (room / "run.json").write_text(json.dumps({"schema_version": 1, "state": "done", "attempt": 1, **change}))
    with pytest.raises(ValueError, match=f"{next(iter(change))} is not one that this program writes"):
        read_record(room)


@pytest.mark.parametrize(
    "metadata", [1, [], {"appliance": 1}, {"appliance": "[" * 100_000}, {"appliance": '{"schema_version": 1}'}]
)
def test_a_profile_whose_header_is_another(room: Path, metadata: object) -> None:
    text = json.dumps({"__metadata__": metadata}).encode()
    (room / "profile.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(EngineError, match=r"not a safetensors file|not a profile|header"):
        read_file_header(room)


@pytest.mark.parametrize("shape", [5, "ab", [1.5], [[1]], None])
def test_a_shape_that_is_none(room: Path, shape: object) -> None:
    text = json.dumps({"a": {"shape": shape}}).encode()
    (room / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ValueError, match="a shape is no list of whole numbers"):
        tensor_shapes(room)


def test_sizes_of_a_model_that_no_model_has(room: Path) -> None:
    (room / "config.json").write_text(json.dumps({"hidden_size": 10**400, "num_hidden_layers": -1, "vocab_size": True}))
    shape = read_shape(room / "config.json")
    assert shape is not None and (shape.hidden, shape.layers, shape.vocab) == (0, 0, 0)
    (room / "config.json").write_text("[" * 100_000)
    assert read_shape(room / "config.json") is None


@pytest.mark.parametrize("value", ["~nobody-here/x.yaml", "x" * 5000, "a/" * 3000])
def test_a_variable_of_flashrl_that_is_no_path(value: str) -> None:
    with pytest.raises(RecipeError, match="FLASHRL_CONFIG"):
        read_variables({"FLASHRL_CONFIG": value, "FLASHRL_LOGGING_FILE": value})


def test_a_place_in_a_message_is_no_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    console.say("r.yaml:100: model: no :thumbs_up: here")
    assert capsys.readouterr().err == "r.yaml:100: model: no :thumbs_up: here\n"


def test_a_file_whose_name_begins_like_a_home(room: Path) -> None:
    assert full_path("./~nobody-here") == Path.cwd() / "~nobody-here"

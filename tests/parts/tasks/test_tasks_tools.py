"""The user's tools, described in a child as before a run, with transformers and a real tokenizer."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from plans import make_plan, with_own_task

from appliance.errors import RecipeError
from appliance.record.code import copy_code
from appliance.record.plan import CodeFile
from appliance.tasks import tools
from appliance.tasks.tiny_model import TOOL_TEMPLATE, save_tokenizer
from appliance.tasks.tools import (
    ToolsRequest,
    call_tool,
    read_schemas,
    read_tools,
    template_problem,
    tools_request,
    write_schemas,
)

GOOD = '''
from json import dumps

def multiply(a: int, b: int = 2) -> int:
    """
    Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b

def _secret(a): ...
'''
SCHEMA = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiplies two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "The first number."},
                "b": {"type": "integer", "description": "The second number."},
            },
            "required": ["a"],
        },
        "return": {"type": "integer"},
    },
}
BAD = '''
def no_hint(a, b: int) -> int:
    """Adds."""
def no_docstring(a: int) -> int:
    return a
def not_described(a: int) -> int:
    """Adds."""
async def waits(a: int) -> int:
    """Adds."""
def many(*numbers: int) -> int:
    """Adds."""
'''


def problems(file: Path, *, model: str = "") -> list[str]:
    with pytest.raises(RecipeError) as caught:
        read_tools(ToolsRequest(str(file), model))
    assert {hint for _, hint in caught.value.problems} == {"docs/own-task.md shows one"}
    return [message for message, _ in caught.value.problems]


def write(folder: Path, text: str) -> Path:
    path = folder / "tools.py"
    path.write_text(text)
    return path


def test_hints_and_docstring_are_the_schema(tmp_path: Path) -> None:
    schemas = read_tools(ToolsRequest(str(write(tmp_path, GOOD))))
    assert schemas == [SCHEMA]
    write_schemas(schemas, tmp_path / "tools.json")
    assert read_schemas(str(tmp_path / "tools.json")) == schemas and read_schemas("") == []


def test_every_function_that_is_no_tool_is_named(tmp_path: Path) -> None:
    file = write(tmp_path, BAD)
    described = (
        "Cannot generate JSON schema for not_described because the docstring has no description for the argument 'a'"
    )
    assert problems(file) == [
        f"task.tools: {file}: no_hint: no type hint for a",
        f"task.tools: {file}: no_docstring: no docstring: the model reads there what the tool is for",
        f"task.tools: {file}: not_described: {described}",
        f"task.tools: {file}: waits: a tool is a plain function, not `async`",
        f"task.tools: {file}: many: a tool has named parameters only",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("from json import dumps\n", "it has no public functions of its own"),
        ("def f(:\n", "cannot be imported: SyntaxError: invalid syntax (tools.py, line 1)"),
        ("raise OSError('away')\n", "cannot be imported: OSError: away (tools.py, line 1)"),
        ("import os\nos._exit(3)\n", "its process ended with 3: no message"),
        ("import sys\nsys.exit('bye')\n", "cannot be imported: SystemExit: bye (tools.py, line 2)"),
        ("print(input())\n", "cannot be imported: EOFError: EOF when reading a line (tools.py, line 1)"),
    ],
)
def test_a_file_that_has_none_is_told(text: str, problem: str, tmp_path: Path) -> None:
    file = write(tmp_path, text)
    assert problems(file) == [f"task.tools: {file}: {problem}"]


def test_a_file_whose_import_never_ends_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "STARTS_WITHIN_S", 2.0)
    file = write(tmp_path, "while True: pass")
    assert problems(file) == [f"task.tools: {file}: not imported after 2 s"]


def test_a_chat_template_without_tools_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD)
    for name, calls_tools in (("with", True), ("without", False)):
        save_tokenizer(tmp_path / name, max_positions=64, calls_tools=calls_tools)
    assert read_tools(ToolsRequest(str(file), str(tmp_path / "with"))) == [SCHEMA]
    assert problems(file, model=str(tmp_path / "without")) == [
        f"task.tools: the chat template of {tmp_path / 'without'} has no tools"
    ]


LLAMA = """{"name": {{ call.function.name | tojson }}, "parameters": {{ call.function.arguments | tojson }}}"""
CODER = "<tool_call><function={{ call.function.name }}></function></tool_call>"
HERMES = "<tool_call>{{ call.function | tojson }}</tool_call>"
ANSWER = "<tool_response>{{ message.content }}</tool_response>"
ONE_CALL = "{% if (message.tool_calls or []) | length > 1 %}{{ raise_exception('only single tool-calls') }}{% endif %}"
NOT_HERMES = 'has no calls of the hermes form, <tool_call>{"name": ..., "arguments": {...}}</tool_call>'


@pytest.mark.parametrize(
    ("part", "instead", "problem"),
    [
        (HERMES, LLAMA, NOT_HERMES),
        (HERMES, CODER, NOT_HERMES),
        (HERMES, "", NOT_HERMES),
        (HERMES, ONE_CALL + HERMES, "fails with these tools: only single tool-calls"),
        (ANSWER, "{{ raise_exception('no role tool') }}", "fails with these tools: no role tool"),
        (ANSWER, "{{ message.content.name.first }}", "fails with these tools: 'str object' has no attribute 'name'"),
        (ANSWER, "", "leaves out what a tool says, or changes it"),
        (ANSWER, ANSWER.replace("content", "content | lower"), "leaves out what a tool says, or changes it"),
        (ANSWER, ANSWER.replace("content", "content[:9]"), "leaves out what a tool says, or changes it"),
        (ANSWER, ANSWER.replace("content", "content | e"), "leaves out what a tool says, or changes it"),
        (ANSWER, ANSWER.replace("content", "content | tojson"), ""),
        (ANSWER, ANSWER.replace("content", "content | trim"), ""),
        (ANSWER, ANSWER + "{{ strftime_now('%f') }}", ""),
        (
            "{% if message.role == 'assistant' %}=",
            "{% if message.role == 'assistant' %}={{ loop.last }}",
            "changes what was said when a tool answers",
        ),
    ],
)
def test_a_chat_template_of_another_form_is_refused(part: str, instead: str, problem: str, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, max_positions=64, calls_tools=True)
    assert part in TOOL_TEMPLATE
    tokenizer.chat_template = TOOL_TEMPLATE.replace(part, instead)
    tokenizer.save_pretrained(tmp_path)
    expected = f"the chat template of {tmp_path} {problem}" if problem else ""
    assert template_problem(ToolsRequest("", str(tmp_path)), [SCHEMA]) == expected


AT_ITS_IMPORT = """
print('[]')
print('{"tools": {}}')
import atexit
atexit.register(print, 'bye')
import subprocess
subprocess.Popen(['sleep', '600'])
import threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
import os
os.fork()
"""


def test_what_a_file_does_at_its_import_is_nothing_to_us(tmp_path: Path) -> None:
    assert read_tools(ToolsRequest(str(write(tmp_path, f"{AT_ITS_IMPORT}{GOOD}")))) == [SCHEMA]


def test_a_default_may_be_left_out(tmp_path: Path) -> None:
    assert call_tool(str(write(tmp_path, GOOD)), None, "multiply", '{"a": 4}').text == "8"


def test_a_run_describes_its_copy_which_may_import_what_lies_beside_the_users_file(tmp_path: Path) -> None:
    text = f"from beside import NOTHING\n{GOOD}"
    for folder in ("a", "run"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a" / "beside.py").write_text("NOTHING = 0")
    file = write(tmp_path / "a", text)
    code = CodeFile(path=str(file), copy_name="tools.py", sha256=hashlib.sha256(text.encode()).hexdigest())
    plan = with_own_task(make_plan(tmp_path / "run"), tools=str(file), code=(code,))
    assert tools_request(plan, model="") == ToolsRequest(
        str(file), import_path=(str(tmp_path / "a"),), sha256=code.sha256, beside=str(tmp_path / "a")
    )  # there is no copy yet
    copy_code(plan)
    file.write_text("def other(:")
    asked = tools_request(plan, model="")
    assert (asked.file, read_tools(asked)) == (str(tmp_path / "run" / "code" / "tools.py"), [SCHEMA])
    (tmp_path / "run" / "code" / "tools.py").unlink()
    with pytest.raises(RecipeError, match="it is not the file that was planned"):
        read_tools(tools_request(plan, model=""))


def test_a_file_that_was_not_planned_answers_nothing(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD)
    answer = call_tool(str(file), "0" * 64, "multiply", '{"a": 4}')
    why = f"error: UserCodeError: {file}: it is not the file that was planned: it has changed since"
    assert (answer.text, answer.failed) == (why, True)

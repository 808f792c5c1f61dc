"""Tools: the public functions of a Python file of the user's, which the model may call in its turns.

The file is the user's code. It runs in two places only: in the child that describes it, `python -m
appliance.tasks.tools` with a ToolsRequest as JSON on stdin; and in the processes of the reward pool, where the
functions are called. Imports no torch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError, validate_call

from appliance.errors import RecipeError, first_line
from appliance.finding import fault
from appliance.record.code import as_it_runs
from appliance.record.plan import RunPlan
from appliance.tasks.grading import in_words
from appliance.tasks.user_code import UserCodeError, load_module, open_voice, run_child
from appliance.terms.clock import ANY_DAY, clock_of
from appliance.terms.counts import counted

MOST_CHARACTERS = 4096  # of what a tool says, and of a message about it
STARTS_WITHIN_S = 60.0  # the child: it loads transformers
_BEGUN = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
_ANSWER = 'Tool {number} says: "17 < 18 & <b>Ä</b>"\n  {{}} End{number}'  # with what is special in HTML, JSON and jinja
_HINT = "docs/own-task.md shows one"

Schema = dict[str, Any]
"""Schema of one function, as chat templates want it: {"type": "function", "function": {...}}."""


@dataclass(frozen=True)
class Described:
    schemas: list[Schema] = field(default_factory=list)
    """Schema of each tool, in the order of the file."""
    problems: list[str] = field(default_factory=list)
    """Problems of the tools: `name: what is wrong with it`."""


@dataclass(frozen=True)
class ToolAnswer:
    """Answer that a call gives the model."""

    text: str
    failed: bool = False
    """Whether the call failed; the text says why."""


def failure(why: str) -> ToolAnswer:
    return ToolAnswer(_shortened(f"error: {why}"), failed=True)


def call_tool(file: str, sha256: str | None, name: str, arguments: str, beside: str = "") -> ToolAnswer:
    """Call a tool, in a process of the pool. What goes wrong is the answer.

    sha256, beside: as of load_module.  arguments: a JSON object, as the model wrote it.
    """
    try:
        tools = functions(load_module(file, sha256=sha256, beside=beside))
    except BaseException as error:  # the boundary of the user's code, as below: `sys.exit()` is no Exception
        return failure(f"{type(error).__name__}: {error}")
    function = tools.get(name)
    if function is None:
        return failure(f"there is no tool `{name}`, only {', '.join(tools)}")
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        return failure(f"the arguments of `{name}` are not JSON: {error}")
    if not isinstance(values, dict):
        return failure(f"the arguments of `{name}` are not a JSON object")
    try:
        inspect.signature(function).bind(**values)
    except TypeError as error:
        return failure(f"`{name}`: {error}")
    try:
        said = _checked(function)(**values)
        text = said if isinstance(said, str) else json.dumps(said, default=str, ensure_ascii=False)
    except ValidationError as error:
        first = error.errors()[0]
        return failure(f"`{name}`: {'.'.join(map(str, first['loc']))}: {first['msg']}")
    except BaseException as error:
        return failure(f"{type(error).__name__}: {error}")
    return ToolAnswer(_shortened(text))


_checked = functools.cache(validate_call)


def functions(module: ModuleType) -> dict[str, Callable[..., object]]:
    """Return the tools of a file: its own public functions."""
    return {
        name: each
        for name, each in vars(module).items()
        if inspect.isfunction(each) and each.__module__ == module.__name__ and not name.startswith("_")
    }


def describe(module: ModuleType) -> Described:
    from transformers.utils import get_json_schema  # seconds

    described = Described()
    for name, function in functions(module).items():
        if problem := _problem(function):
            described.problems.append(f"{name}: {problem}")
            continue
        try:
            described.schemas.append(get_json_schema(function))
        except Exception as error:  # the boundary of the user's hints and docstrings: what transformers says of them
            described.problems.append(f"{name}: {first_line(error)}")
    if not described.schemas and not described.problems:
        described.problems.append("it has no public functions of its own")
    return described


def _problem(function: Callable[..., object]) -> str:
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "a tool is a plain function, not `async`"
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is not each.POSITIONAL_OR_KEYWORD and each.kind is not each.KEYWORD_ONLY for each in parameters):
        return "a tool has named parameters only"
    if bare := [each.name for each in parameters if each.annotation is each.empty]:
        return f"no type hint for {', '.join(bare)}"
    if not (function.__doc__ or "").strip():
        return "no docstring: the model reads there what the tool is for"
    return ""


def _shortened(text: str) -> str:
    text = text.encode(errors="replace").decode()  # a lone surrogate is no text to a tokenizer
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]} ... ({counted(len(text) - MOST_CHARACTERS, 'more character')})"


@dataclass(frozen=True)
class ToolsRequest:
    """Request to the child that describes tools."""

    file: str
    model: str = ""
    """Model whose chat template is to be checked, or empty."""
    trust_remote_code: bool = False
    import_path: tuple[str, ...] = ()
    """Folders from which the file may import what lies beside it."""
    sha256: str | None = None
    """SHA-256 of the file, as `load_module` takes it."""
    beside: str = ""
    """The user's folder of the file, as `load_module` takes it."""


def tools_request(plan: RunPlan, *, model: str) -> ToolsRequest:
    """Make the request for a plan's tools: for the run's copy, where there is one."""
    tools, files = as_it_runs(plan).tools, plan.task_files
    if not tools:
        return ToolsRequest("")
    sha256, beside = files.sha256_of(tools), files.folder_of(tools)
    return ToolsRequest(tools, model, plan.model.trust_remote_code, files.import_path, sha256, beside)


def read_tools(request: ToolsRequest) -> list[Schema]:
    """Read the schemas of the file's functions, made in a child; none without a file. Raises RecipeError with all that
    is wrong with them."""
    if not request.file:
        return []
    output = run_child("appliance.tasks.tools", stdin=json.dumps(asdict(request)), within_s=STARTS_WITHIN_S)
    if "tools" not in output.words:
        if output.is_late:
            raise _refused(f"{request.file}: not imported after {STARTS_WITHIN_S:g} s")
        raise _refused(f"{request.file}: its process ended with {output.code}: {output.printed}")
    described = Described(**output.words["tools"])
    if described.problems:
        raise RecipeError([fault(("task.tools",), problem, _HINT) for problem in described.problems])
    return described.schemas


def _refused(why: str) -> RecipeError:
    return RecipeError([fault(("task.tools",), why, _HINT)])


def write_schemas(schemas: list[Schema], path: Path) -> None:
    path.write_text(json.dumps(schemas, ensure_ascii=False))


def read_schemas(path: str) -> list[Schema]:
    """Read the schemas of a run; none where its task has no tools."""
    return json.loads(Path(path).read_text()) if path else []


def template_problem(request: ToolsRequest, schemas: list[Schema]) -> str:
    """Return the reason why the model's chat template cannot work with these tools, or an empty text."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(request.model, trust_remote_code=request.trust_remote_code)
        clock = clock_of(tokenizer, date=ANY_DAY)
        render = functools.partial(tokenizer.apply_chat_template, tokenize=False, **clock)
        if render(_BEGUN, tools=schemas) == render(_BEGUN):
            problem = "has no tools"
        else:
            name = schemas[0]["function"]["name"]
            with_tools = functools.partial(render, tools=schemas)
            problem = _turn_problem(with_tools, [name]) or _turn_problem(with_tools, [name, name])
    except Exception as error:  # the boundary of the model's template, which is a program: jinja's errors and Python's
        problem = f"fails with these tools: {first_line(error)}"
    return problem and f"the chat template of {request.model} {problem}"


def _turn_problem(render: Callable[..., str], names: list[str]) -> str:
    """Check a turn that calls these tools, and what they say, as verl's continuous-token builder has them rendered."""
    called = [{"name": name, "arguments": {"a": 1}} for name in names]
    calls = [{"id": f"call{n:05}", "type": "function", "function": function} for n, function in enumerate(called)]
    turn = {"role": "assistant", "content": "", "reasoning_content": "reasons", "tool_calls": calls}
    answers = [_ANSWER.format(number=number) for number in range(len(names))]
    tools = [
        {"role": "tool", "name": name, "tool_call_id": call["id"], "content": answer}
        for name, call, answer in zip(names, calls, answers, strict=True)
    ]
    before, after = render([*_BEGUN, turn]), render([*_BEGUN, turn, *tools], add_generation_prompt=True)
    if _hermes_calls(before)[-len(called) :] != called:
        return 'has no calls of the hermes form, <tool_call>{"name": ..., "arguments": {...}}</tool_call>'
    if not after.startswith(before):
        return "changes what was said when a tool answers"
    return "" if _has_all(after[len(before) :], answers) else "leaves out what a tool says, or changes it"


def _has_all(rendering: str, answers: Sequence[str]) -> bool:
    """Tell whether each answer is there whole, in order: as text, or as the JSON of it."""
    end = 0
    for answer in answers:
        forms = (answer, json.dumps(answer)[1:-1], json.dumps(answer, ensure_ascii=False)[1:-1])
        places = [(rendering.find(form, end), len(form)) for form in forms]
        begin, length = next(((begin, length) for begin, length in places if begin >= 0), (-1, 0))
        if begin < 0:
            return False
        end = begin + length
    return True


def _hermes_calls(text: str) -> list[object]:
    calls = []
    for inner in re.findall("<tool_call>(.*?)</tool_call>", text, re.DOTALL):
        with contextlib.suppress(ValueError):  # a template that says what a call looks like
            calls.append(json.loads(inner))
    return calls


def main() -> int:
    request = ToolsRequest(**json.loads(sys.stdin.buffer.read()))
    say = open_voice()
    sys.path.extend(request.import_path)  # as in the pool
    say("tools", asdict(_described(request)))
    os._exit(0)  # threads and exit handlers of the user's are none of ours


def _described(request: ToolsRequest) -> Described:
    try:
        module = load_module(request.file, sha256=request.sha256, beside=request.beside)
    except UserCodeError as error:
        return Described(problems=[str(error)])
    except (Exception, SystemExit) as error:  # the boundary of the user's code
        return Described(problems=[f"{request.file}: cannot be imported: {in_words(error)}"])
    described = describe(module)
    problems = [f"{request.file}: {problem}" for problem in described.problems]
    if request.model and described.schemas and (problem := template_problem(request, described.schemas)):
        problems.append(problem)
    return replace(described, problems=problems)


if __name__ == "__main__":
    sys.exit(main())

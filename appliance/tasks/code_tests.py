"""The tests that a truth contains, for the reward `code`, in the forms that public data sets have.

Stdin and stdout, calls of a function, and statements of Python that assert. A test of one form is never run as one of
another: what names no form, or a form that is not known, is refused by its field.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.tasks.answers import given_alternatives
from appliance.terms.counts import counted

_FUNCTION = re.compile(r"(?i)(?:fn|func|function|method|entry)(?:[_-]?(?:name|point))?")
_KINDS = ("testtype", "test_type", "type")
_LISTS = ("test_cases", "tests", "test_list", "assert_case")
_SETUPS = ("test_imports", "test_setup_code", "test_setup")
_STDIN = ("stdin", "stdin_stdout", "standard_input", "stdio")
_CALL = ("functional", "function", "function_call", "call_based")
_PYTHON = re.compile(r"(?i)(?:python|py)[\s.\d]*")
_EXPRESSION = re.compile(r"[A-Za-z_]\w*(?:\(\))?(?:\.[A-Za-z_]\w*)*")  # `add`, `Solution().add`
_EXAMPLE = (
    '`[{"input": "1 2", "output": "3"}]` or `{"inputs": ["1 2"], "outputs": ["3"]}`, '
    'with `"fn_name": "add"` for calls; or a list of asserts'
)


@dataclass(frozen=True)
class StdinTest:
    """The program reads `stdin` and prints `stdout`."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class CallTest:
    """A function of the program, or a method of its class `Solution`, returns one of `accepted`."""

    function: str
    arguments: list[Any]
    accepted: tuple[Any, ...]


@dataclass(frozen=True)
class StatementTest:
    """Python that runs after the program, and raises where the program is wrong."""

    statements: str


CodeTest = StdinTest | CallTest | StatementTest


@dataclass(frozen=True)
class _Shared:
    """Settings of a truth that are for all its tests."""

    function: str = ""
    kind: str = ""
    setup: str = ""


def read_tests(truth: str) -> list[CodeTest]:
    """Read the tests of a truth. Raises ValueError for a truth that has none, with the field that is wrong, and where
    the row has no truth."""
    given_alternatives(truth)
    try:
        value = json.loads(truth)
        value = json.loads(value) if isinstance(value, str) else value  # JSON within JSON
    except (ValueError, RecursionError):
        value = truth
    try:
        tests = _tests(value, shared=_Shared())
    except RecursionError:
        tests = []
    if not tests:
        raise ValueError(f"the truth `{truth[:60]}` has no tests: it is JSON such as {_EXAMPLE}")
    return tests


def _tests(value: Any, *, shared: _Shared) -> list[CodeTest]:
    """Read tests from a value; empty where it has none of the forms. Raises ValueError for a field that is wrong."""
    if isinstance(value, str):
        return _of_source(value, shared=shared)
    if isinstance(value, list):
        if value and all(isinstance(member, str) for member in value):
            return _of_source("\n".join(value), shared=shared)
        if not all(isinstance(member, dict) for member in value):
            return []
        parts = [_tests(member, shared=shared) for member in value]
        if any(parts) and not all(parts):
            raise ValueError(
                f"test {parts.index([]) + 1} of {len(parts)} has none of the known forms, and other tests have one"
            )
        return [test for part in parts for test in part]
    return _of_object(value, shared=shared) if isinstance(value, dict) else []


def _of_object(value: Mapping[str, Any], *, shared: _Shared) -> list[CodeTest]:
    language = value.get("language")
    if isinstance(language, str) and language.strip() and not _PYTHON.fullmatch(language.strip()):
        raise ValueError(f"`language` is `{language[:40]}`, and only programs in Python are run")
    setup = "\n".join(_lines_of(value[name]) for name in _SETUPS if value.get(name))
    shared = _Shared(
        _function(value) or shared.function, _kind(value) or shared.kind, f"{shared.setup}\n{setup}".strip()
    )
    if isinstance(value.get("test"), str):
        return _of_source(value["test"], shared=shared)
    for name in _LISTS:
        if value.get(name) is not None:
            return _tests(value[name], shared=shared)
    for given, wanted in (("inputs", "outputs"), ("input", "output")):
        if given in value and wanted in value:
            return _of_pairs(value[given], value[wanted], shared=shared, names=(given, wanted))
    return []


def _lines_of(value: Any) -> str:
    """Join the lines of a text, or of a list of texts."""
    return "\n".join(value) if isinstance(value, list) and all(isinstance(line, str) for line in value) else str(value)


def _function(value: Mapping[str, Any]) -> str:
    """Return the name of what is called; empty where nothing is named."""
    metadata = value.get("metadata")
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except (ValueError, RecursionError):
            metadata = None
    for fields in (value, metadata if isinstance(metadata, dict) else {}):
        for name, function in fields.items():
            if not _FUNCTION.fullmatch(name) or function is None or function == "":
                continue
            if not isinstance(function, str) or not _EXPRESSION.fullmatch(function.strip()):
                raise ValueError(f"`{name}` is `{str(function)[:40]}`, which names no function")
            return function.strip()
    return ""


def _kind(value: Mapping[str, Any]) -> str:
    """Return `stdin`, `call`, or empty where the kind is not stated. Raises ValueError for another kind of tests."""
    for name in _KINDS:
        if (kind := value.get(name)) is None or kind == "":
            continue
        if kind in _STDIN:
            return "stdin"
        if kind in _CALL:
            return "call"
        if name == "type":
            continue  # such as `train`: other things have a type, too
        raise ValueError(f"`{name}` is `{str(kind)[:40]}`, neither one of {_listed(_STDIN)} nor of {_listed(_CALL)}")
    return ""


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _of_pairs(inputs: Any, outputs: Any, *, shared: _Shared, names: tuple[str, str]) -> list[CodeTest]:
    """Make tests of lists as long as each other, or one test."""
    is_one = names[0] == "input" and not (isinstance(inputs, list) and isinstance(outputs, list) and _is_stdin(shared))
    for name, value in zip(names, (inputs, outputs), strict=True):
        if not is_one and not isinstance(value, list):
            raise ValueError(f"`{name}` is {_shown(value)}, but must be a list with an entry for each test")
    if not is_one and len(inputs) != len(outputs):
        entries = counted(len(inputs), "entry", plural="entries")
        raise ValueError(f"`{names[0]}` has {entries} and `{names[1]}` {len(outputs)}: each test needs one of both")
    pairs = [(inputs, outputs)] if is_one else list(zip(inputs, outputs, strict=True))
    if shared.kind == "call" and not shared.function:
        raise ValueError("its tests are calls of a function, and no `fn_name` beside them says of which one")
    if not _is_stdin(shared):
        return _calls(pairs, function=shared.function.rpartition(".")[2], names=names)
    if shared.kind == "stdin":
        pairs = [(_joined(one), _joined(other)) for one, other in pairs]
    for name, text in ((name, text) for pair in pairs for name, text in zip(names, pair, strict=True)):
        if not isinstance(text, str):
            raise ValueError(
                f"`{name}` is {_shown(text)}, which is not text, and no `fn_name` says that the tests are calls"
            )
    return [StdinTest(one, other) for one, other in pairs]


def _shown(value: Any) -> str:
    return f"`{json.dumps(value)[:40]}`"


def _is_stdin(shared: _Shared) -> bool:
    return shared.kind == "stdin" or not (shared.kind or shared.function)


def _joined(value: Any) -> Any:
    """Join lines of text to the text that they are."""
    is_lines = isinstance(value, list) and all(isinstance(line, str) for line in value)
    return "\n".join(value) if is_lines else value


def _calls(pairs: list[tuple[Any, Any]], *, function: str, names: tuple[str, str]) -> list[CodeTest]:
    """Make tests of calls. A text contains JSON, an argument a line, and its answer is JSON too, as LiveCodeBench has
    them. A list contains the arguments. Where every answer is a list of one, it may mean its member, as in APPS."""
    is_wrapped = all(isinstance(expected, list) and len(expected) == 1 for _, expected in pairs)
    tests: list[CodeTest] = []
    for call_input, expected in pairs:
        if isinstance(call_input, str):
            arguments, accepted = _arguments(call_input, name=names[0]), (_json_of(expected, name=names[1]),)
        elif isinstance(call_input, dict):
            raise ValueError(f"`{names[0]}` is an object, and a call of `{function}` takes a list of arguments")
        else:
            arguments = call_input if isinstance(call_input, list) else [call_input]
            accepted = (expected, expected[0]) if is_wrapped else (expected,)
        tests.append(CallTest(function, arguments, accepted))
    return tests


def _arguments(text: str, *, name: str) -> list[Any]:
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError:
        return [_json_of(text, name=name)]


def _json_of(value: Any, *, name: str) -> Any:
    """Parse JSON. Raises ValueError for a text that is none."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError(f"`{name}` of a call is the text `{value[:40]}`, which is not JSON") from None


def _of_source(source: str, *, shared: _Shared) -> list[CodeTest]:
    """Return each statement that asserts, with the statements before it; each test function; `check` of what is called.
    Raises ValueError for tests that only a library such as pytest or unittest could run."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    called = {_called(node) for node in body}
    used = {name.id for node in body for name in ast.walk(node) if isinstance(name, ast.Name)}
    for node in body:
        if not (isinstance(node, ast.FunctionDef) and node.name in used):  # a helper of other tests
            _refuse_tests_of_libraries(node)
    before, tests = [shared.setup] if shared.setup else [], list[CodeTest]()
    for node in body:
        if _is_main(node):
            continue
        statement = ast.unparse(node)
        is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        asserts = not is_definition and any(isinstance(part, ast.Assert) for part in ast.walk(node))
        if asserts or _called(node) in defined:
            tests.append(StatementTest("\n".join([*before, statement])))
        else:
            before.append(statement)
    whole = "\n".join(before)
    if "check" in defined - called:
        if not shared.function:
            raise ValueError("it has `check(candidate)`, and no `entry_point` beside `test` names what is checked")
        tests.append(StatementTest(f"{whole}\ncheck({shared.function})"))
    helpers = {
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef) and node.name in used and node.name not in called and _needs_more(node)
    }
    functions = sorted(name for name in defined - called - helpers if name.startswith("test"))
    return tests + [StatementTest(f"{whole}\n{name}()") for name in functions]


def _needs_more(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Tell whether a function is not one that is called as `f()`."""
    takes = node.args
    needed = len(takes.posonlyargs) + len(takes.args) - len(takes.defaults) + takes.kw_defaults.count(None)
    return bool(needed or node.decorator_list or isinstance(node, ast.AsyncFunctionDef))


def _refuse_tests_of_libraries(node: ast.stmt) -> None:
    """Raise ValueError for a test function that needs arguments, a decorator or an event loop, and for one in a class:
    called without them it fails, whatever the program is."""
    if isinstance(node, ast.ClassDef):
        inner = [part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
        if any(name.startswith("test") for name in inner):
            raise ValueError(f"its tests are methods of the class `{node.name}`: make each a function `test_...()`")
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if is_function and node.name.startswith("test") and _needs_more(node):
        reason = (
            "has a decorator" if node.decorator_list else "has parameters" if node.args.args else "is no plain function"
        )
        raise ValueError(
            f"the test function `{node.name}` {reason}: make a function of each case, `def {node.name}_1():`"
        )


def _called(node: ast.stmt) -> str:
    """Return the function that a statement calls, doing no more, or empty."""
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
    return node.value.func.id if is_call else ""


def _is_main(node: ast.stmt) -> bool:
    """`if __name__ == "__main__":`, which would run nothing here."""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)

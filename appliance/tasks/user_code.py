"""Functions of the user's Python files. What is imported here runs: only a child process may do it.

`run_child` starts such a process and `open_voice` speaks in it: what the user's code prints, leaves behind or breaks is
heard by nobody.

A reward function has one of three forms, distinguished by the names of its parameters. Each gets those values of its
form that it names, by name, or all of them where it takes `**`: what it requires besides is refused.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from appliance.processes import end_with_parent, module_argv
from appliance.tasks.neighbours import PREFIX, folder_of_modules
from appliance.tasks.rows import Row
from appliance.tasks.task import Response
from appliance.terms.schemes import listed

FORMS = (
    "f(response, truth, *, row, messages), of which it needs no more than it names; "
    "TRL's f(prompts, completions, completion_ids, **columns); "
    "verl's compute_score(data_source, solution_str, ground_truth, extra_info)"
)
_OURS, _TRLS, _VERLS = (
    ("response", "truth", "row", "messages"),
    ("prompts", "completions", "completion_ids"),
    ("data_source", "solution_str", "ground_truth", "extra_info"),
)

_POLL_S = 0.1
_TAIL_BYTES = 4096
_SHOWN = 200  # characters

Given = Callable[[Row], tuple[str | list[dict[str, str]], object]]  # a row's (prompt, truth), as the row has it
Values = dict[str, object]


class UserCodeError(ValueError):
    """A file of the user's that lacks a function, or a function that cannot be called as a reward or returned none."""

    remedy: str
    """What to do about it; empty for the usual remedy."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


def load_function(
    file: str, name: str, *, parts_of_row: Given, sha256: str | None = None, beside: str = ""
) -> Callable[[Response], object]:
    """Load a reward function of the user's. sha256, beside: as of load_module. Raises what the file raises when it is
    imported, and UserCodeError."""
    module = load_module(file, sha256=sha256, beside=beside)
    function = getattr(module, name, None)
    if not callable(function):
        functions = {key: value for key, value in vars(module).items() if inspect.isfunction(value)}
        there = [key for key, value in functions.items() if value.__module__ == module.__name__]
        near = difflib.get_close_matches(name, there, n=1)
        remedy = f"did you mean `{near[0]}`?" if near else f"use one of {listed(there)}" if there else "define it there"
        raise UserCodeError(f"{file}: there is no function `{name}` in it", remedy=remedy)
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        raise UserCodeError(f"{file}: `{name}` does not say what it takes; a reward is one of {FORMS}") from None
    takes = signature.parameters
    parameter_names = {
        parameter.name
        for parameter in takes.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    needed = {
        parameter.name
        for parameter in takes.values()
        if parameter.default is parameter.empty and parameter.kind not in _ANY
    }
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    form = next((form for form in (_verls, _trls, _ours) if parameter_names & _MARKS[form]), None)
    unknown = sorted(needed - parameter_names) or ([] if form is _trls else sorted(needed - _NAMES.get(form, set())))
    if form is None or unknown:
        raise UserCodeError(f"{file}: `{name}{signature}` is none of the three forms of a reward: {FORMS}")

    def value(response: Response) -> object:
        row: Row = json.loads(response.row) if response.row else {}
        values = form(response, row, parts_of_row)
        if missing := sorted(needed - values.keys()):
            raise UserCodeError(f"{file}: `{name}` wants `{missing[0]}`, which the row does not have")
        returned = function(**(values if takes_all else {key: values[key] for key in parameter_names & values.keys()}))
        if inspect.isawaitable(returned):
            import asyncio  # the launcher, which knows this file, does without

            returned = asyncio.run(_awaited(returned))
        return _reward(returned, form=form, name=name)

    return value


def _ours(response: Response, row: Row, _: Given) -> Values:
    said = [{"role": role, "content": content} for role, content in response.messages]
    return dict(zip(_OURS, (response.text, response.truth, row, said), strict=True))


def _trls(response: Response, row: Row, parts_of_row: Given) -> Values:
    """Make TRL's arguments: lists of one. A completion is a list of messages where the prompt is one: of several turns
    the last."""
    prompt, _ = parts_of_row(row)
    completion = [{"role": "assistant", "content": response.written}] if isinstance(prompt, list) else response.written
    columns = {name: [value] for name, value in row.items() if name not in ("prompt", "completion")}
    ids = list(response.token_ids)
    return columns | dict(zip(_TRLS, ([prompt], [completion], [ids]), strict=True))


def _verls(response: Response, row: Row, parts_of_row: Given) -> Values:
    """Make verl's arguments: the truth as the row has it, text or not."""
    source, extra = row.get("data_source") or "own", row.get("extra_info") or {}
    return dict(zip(_VERLS, (source, response.written, parts_of_row(row)[1], extra), strict=True))


_Form = Callable[[Response, Row, Given], Values]
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_MARKS: dict[_Form, set[str]] = {_verls: {"solution_str"}, _trls: set(_TRLS), _ours: {"response"}}
_NAMES: dict[_Form | None, set[str]] = {_verls: set(_VERLS), _trls: set(_TRLS), _ours: set(_OURS)}


def _reward(returned: object, *, form: _Form, name: str) -> object:
    """Return a reward that is a finite number or None. Raises UserCodeError for any other."""
    if form is _trls:
        is_list = isinstance(returned, Iterable) and not isinstance(returned, str | bytes | Mapping)
        values = list(returned) if is_list and getattr(returned, "ndim", 1) else []
        if len(values) != 1:  # an array or a tensor is a list to TRL, too
            told = f"a list of {len(returned)}" if isinstance(returned, list) else repr(returned)[:60]
            raise UserCodeError(f"`{name}` returned {told} for one completion, not a list of one")
        return values[0]
    if form is _verls and isinstance(returned, Mapping):
        if "score" not in returned:
            raise UserCodeError(f"`{name}` returned a mapping without `score`")
        return returned["score"]
    return returned


async def _awaited(returned: Any) -> object:
    return await returned


def line_of(error: BaseException) -> str:
    """Name the last line of the user's file on the way to the error, ` (rewards.py, line 3)`, as Python has it for a
    syntax error; empty where there is none."""
    lines = [
        f" ({Path(frame.f_code.co_filename).name}, line {line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith(PREFIX)
    ]
    return lines[-1] if lines else ""


def load_module(file: str, *, sha256: str | None = None, beside: str = "") -> ModuleType:
    """Load a Python file of the user's, once in a process.

    beside: the user's folder, whose modules the file's imports find first; empty: that in which the file lies.
    sha256: what the plan has, and nothing else runs: neither another file nor a `.pyc`; None: whatever is there.
    Raises what the file raises, and UserCodeError.
    """
    name = f"{PREFIX}{file}"
    if name not in sys.modules:
        content = Path(file).read_bytes()
        if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
            raise UserCodeError(f"{file}: it is not the file that was planned: it has changed since")
        spec = importlib.util.spec_from_file_location(name, Path(file))
        assert spec is not None, "a path ends in .py"
        module = importlib.util.module_from_spec(spec)
        with contextlib.ExitStack() as undo:
            sys.modules[name] = module  # a dataclass in it looks there for its own module
            undo.callback(sys.modules.pop, name)
            vars(module)["__builtins__"] = folder_of_modules(beside or str(Path(file).parent)).builtins
            exec(compile(content, file, "exec", dont_inherit=True), vars(module))
            undo.pop_all()
    return sys.modules[name]


@dataclass(frozen=True)
class ChildOutput:
    """Output of a child that has ended."""

    words: Mapping[str, Any]
    """Values that the child reported, by word; a later value replaces an earlier one."""
    code: int
    """Exit code of the child."""
    is_late: bool
    """Whether the child was ended because it was late."""
    printed: str
    """Last line that anything but `open_voice` wrote, in short."""


def run_child(module: str, *, stdin: str, within_s: float) -> ChildOutput:
    """Run a child that may run the user's code, and return what it reported. It is ended, with all that it left, at its
    end or when it has reported nothing new for `within_s`: that is the time for one thing that it does, not for all of
    them.

    module: of ours, whose `main` speaks by `open_voice`.  stdin: on its stdin.
    """
    with (  # no pipes, which may outlive their child; of its text a byte may be none of UTF-8
        tempfile.TemporaryFile("w+", errors="replace") as answers,
        tempfile.TemporaryFile() as printed,
    ):
        child = subprocess.Popen(
            module_argv(module),
            stdin=subprocess.PIPE,
            stdout=answers,
            stderr=printed,
            encoding="utf-8",
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            is_late = not _ends(child, given=stdin, answers=answers, within_s=within_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            code = child.wait()
        answers.seek(0)
        return ChildOutput(words_in(answers.read()), code, is_late, last_line(printed))


def words_in(text: str) -> dict[str, Any]:
    """Return what a child reported by `open_voice`, by word."""
    words: dict[str, Any] = {}
    for line in text.splitlines():  # before the first one a library may have printed
        with contextlib.suppress(ValueError, TypeError):
            words |= json.loads(line)
    return words


def last_line(printed: IO[bytes]) -> str:
    """Return the last line of a file, in short."""
    printed.seek(0, os.SEEK_END)
    printed.seek(max(0, printed.tell() - _TAIL_BYTES))
    lines = printed.read().decode(errors="replace").strip().splitlines()
    return (lines or ["no message"])[-1][:_SHOWN]


def _ends(child: subprocess.Popen[str], *, given: str, answers: IO[str], within_s: float) -> bool:
    unsent: str | None = given
    length, since_s = 0, time.monotonic()
    while time.monotonic() - since_s < within_s:
        try:
            child.communicate(unsent, timeout=_POLL_S)
            return True
        except subprocess.TimeoutExpired:
            unsent = None  # it is sent on by the next call
        if (now := os.fstat(answers.fileno()).st_size) > length:
            length, since_s = now, time.monotonic()
    return False


def open_voice() -> Callable[[str, object], None]:
    """Return, in the child once stdin is read, a function that reports (word, value) as a line of what was stdout. From
    now on stdin is empty, and what anybody prints goes to stderr. A fork that the user's code left behind ends where it
    speaks."""
    child, ours = os.getpid(), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def say(word: str, value: object) -> None:
        if os.getpid() != child:
            os._exit(0)
        ours.write(f"{json.dumps({word: value})}\n")
        ours.flush()

    return say

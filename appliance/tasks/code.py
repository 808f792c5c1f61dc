"""The reward `code`: the share of tests that the program of a response passes. **No sandbox**: the program runs as you.

It runs in its own process, for each test of stdin and stdout in another one, with limits on time, memory,
processes and file sizes. No process in which it runs knows what is right. The network, your files and your other
processes are within its reach.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from appliance.tasks.answers import without_thoughts
from appliance.tasks.code_tests import CallTest, StatementTest, StdinTest, read_tests
from appliance.tasks.task import Response
from appliance.terms.environment import THREADS_VARIABLE

CODE_S = 10.0  # for all tests of one program: what is not done by then has failed
_CHILD = Path(__file__).with_name("code_child.py")
_OUTPUT_BYTES = 16 << 20
_PROGRAM_BYTES = 2 << 30  # of memory
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_NEAR = 1e-6  # how far numbers that a function returns may be apart, of the larger
# Within a line ``` may be a quotation's: there it opens a block only where Python or nothing else follows it.
_FENCED = re.compile(
    r"(?ms)(?:^(?P<before>[ \t]*+(?:(?:[-*+]|\d{1,9}[.)])[ \t]++)?)(?P<fence>`{3,}+|~{3,}+)[ \t]*+"
    r"(?P<label>[^\s`]*+)[^\n`]*+|(?<!`)(?P<within>```)(?P<python>(?i:python3?|py)?)[ \t]*+)"
    r"\n(?P<inner>.*?)(?:(?P=fence)|(?P=within))"
)
_PYTHON = re.compile(r"(?i)\{?\.?(?:python3?|py3?)(?:\.\d+)*(?:[:,{}].*)?")
_ANSWER = re.compile(r"(?s)<answer>(.*?)</answer>")


def code(response: Response) -> float:
    """Return the share of the truth's tests that the program of the response passes."""
    tests, until_s = read_tests(response.truth), time.monotonic() + CODE_S
    source = program_of(response.text)
    if not source.strip():
        return 0.0
    with tempfile.TemporaryDirectory(prefix="appliance-code-") as folder:
        program = Path(folder) / "main.py"
        program.write_text(source, encoding="utf-8", errors="replace")
        passed = sum(_reads_and_prints(program, test, until_s=until_s) for test in tests if isinstance(test, StdinTest))
        others = [test for test in tests if not isinstance(test, StdinTest)]
        passed += sum(_is_right(others[place], value) for place, value in _results(program, others, until_s).items())
    return passed / len(tests)


def program_of(text: str) -> str:
    """Return the last block that is labelled as Python's, else the last block without a label: a block of output may
    follow a program. Without blocks the program is everything that answers; where all blocks are of other languages
    there is none.

    What is thought is no answer, whether the thought ends or not.
    """
    text = without_thoughts(text)
    blocks = [
        _Block(match["before"] or "", match["label"] or match["python"] or "", match["inner"])
        for match in _FENCED.finditer(text)
    ]
    labelled = [block for block in blocks if _PYTHON.fullmatch(block.label)]
    if programs := labelled or [block for block in blocks if not block.label]:
        return programs[-1].outdented()
    if blocks:
        return ""
    answers = _ANSWER.findall(text)
    return answers[-1] if answers else text


@dataclass(frozen=True)
class _Block:
    """A fenced block of Markdown."""

    before: str
    """Text before its fence in the line, where that begins the block."""
    label: str
    """Language of the block, or empty."""
    inner: str

    def outdented(self) -> str:
        """A block in an item of a list is indented as far as its fence, if all of its lines do: Markdown would take
        from each what it has, also where some are indented and others flush."""
        indents = (len(line) - len(line.lstrip(" \t")) for line in self.inner.splitlines() if line.strip())
        margin = min(indents, default=0)
        return re.sub(rf"(?m)^[ \t]{{0,{min(len(self.before), margin)}}}", "", self.inner)


def _reads_and_prints(program: Path, test: StdinTest, *, until_s: float) -> bool:
    output, ended_well = _output([str(program)], test.stdin, folder=program.parent, until_s=until_s)
    return ended_well and _lines(output) == _lines(test.stdout)


def _is_right(test: CallTest | StatementTest, value: Any) -> bool:
    """value: what the test gave at its end, which it reached."""
    return isinstance(test, StatementTest) or any(_is_same(value, accepted) for accepted in test.accepted)


def _results(program: Path, tests: list[CallTest | StatementTest], until_s: float) -> dict[int, Any]:
    """Return what tests give, by their place; nothing of one that fails. One process runs the program and another one
    the tests (`code_child.py`). Where the program ends its own, two new ones run the tests that are left.

    Raises ValueError for a test that no program can pass.
    """
    values: dict[int, Any] = {}
    first = 0
    while first < len(tests) and time.monotonic() < until_s:
        requests = json.dumps([_request(test) for test in tests[first:]])
        lines: list[dict[str, Any]] = []
        for line in _said_by_tests(program, requests, until_s=until_s).splitlines():
            with contextlib.suppress(ValueError, RecursionError):  # what JSON cannot have is no right value
                lines.append(json.loads(line))
        for line in lines:
            if "fault" in line:
                raise ValueError(f"{line['fault']}, and the program takes plain values only")
        values |= {first + line["place"]: line["value"] for line in lines if "value" in line}
        if not lines:  # not even the first began
            break
        first += lines[-1]["place"] + 1
    return values


def _said_by_tests(program: Path, requests: str, *, until_s: float) -> str:
    for_program, for_tests = socket.socketpair()
    with for_program, for_tests, tempfile.TemporaryFile(dir=program.parent) as nothing:
        arguments = [str(_CHILD), "program", str(program), str(for_program.fileno())]
        with _process(arguments, folder=program.parent, output=nothing, descriptors=[for_program.fileno()]):
            for_program.close()  # the tests see that the program's process has ended when nobody has this end
            arguments = [str(_CHILD), "tests", str(for_tests.fileno())]
            output, _ = _output(
                arguments, requests, folder=program.parent, until_s=until_s, descriptors=[for_tests.fileno()]
            )
            return output


def _request(test: CallTest | StatementTest) -> dict[str, Any]:
    if isinstance(test, CallTest):
        return {"function": test.function, "arguments": test.arguments}
    return {"statements": test.statements}


def _is_same(left: Any, right: Any) -> bool:
    """Tell whether two values of JSON are equal: true is not 1, and numbers with a point are compared to 1e-6."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, float) or isinstance(right, float):
        numbers = isinstance(left, float | int) and isinstance(right, float | int)
        return numbers and (left == right or math.isclose(left, right, rel_tol=_NEAR))
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_is_same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_is_same(left[name], right[name]) for name in left)
    return type(left) is type(right) and bool(left == right)


def _output(
    arguments: list[str], stdin: str, *, folder: Path, until_s: float, descriptors: Sequence[int] = ()
) -> tuple[str, bool]:
    """Return what Python writes to stdout, and whether it ends well in time."""
    if (within_s := until_s - time.monotonic()) <= 0:
        return "", False
    is_late = False
    with tempfile.TemporaryFile(dir=folder) as output:
        with _process(arguments, folder=folder, output=output, descriptors=descriptors) as child:
            try:
                child.communicate(stdin.encode(errors="replace"), timeout=within_s)
            except subprocess.TimeoutExpired:
                is_late = True
        output.seek(0)
        return output.read().decode(errors="replace"), child.returncode == 0 and not is_late


@contextlib.contextmanager
def _process(
    arguments: list[str], *, folder: Path, output: IO[bytes], descriptors: Sequence[int]
) -> Iterator[subprocess.Popen[bytes]]:
    """Python within limits. At the end it is ended, with all that it left.

    descriptors: of this process, which it has too.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # this process knows what is right: none may read its memory
    child = subprocess.Popen(
        [sys.executable, "-I", "-B", *arguments],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), THREADS_VARIABLE: "1", "LANG": "C.UTF-8"},
        start_new_session=True,
        pass_fds=descriptors,
        preexec_fn=_limit,
    )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()


def _limit() -> None:
    """Limit the program's process before it begins; it ends with the process that grades."""
    seconds = int(CODE_S) + 1
    for kind, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, _PROGRAM_BYTES),
        (resource.RLIMIT_FSIZE, _OUTPUT_BYTES),
        (resource.RLIMIT_NPROC, 0),  # of this user: no new process or thread, but for root
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]

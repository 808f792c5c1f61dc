"""Runs a program, or its tests, each in its own process: what the program does to its process changes no test.

`python -I -B code_child.py program PROGRAM FD` runs the program, then calls what the tests ask for. `... tests FD` runs
the tests. FD is one end of a socket. On it the tests send calls and the program's process sends what they gave, both as
JSON: plain values are copied. Any other object of the program stays where it is and the tests have a `Remote` of it,
which is equal to no plain value. So no object of the program, and no code of it, is ever in the tests' process.

This file imports nothing of ours. The tests come on stdin as a JSON list of `{"function": ..., "arguments": [...]}` or
`{"statements": ...}`. For each one a line of JSON says its `place` when it begins. When it ends well, a second line has
the `value` that the function returned too.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import json
import operator
import os
import sys
import types
from collections import deque
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any

_RECURSION_LIMIT = 50_000  # that of judges is higher than Python's
_PR_SET_DUMPABLE = 4
# What a judge of such problems has imported: `class Solution` has `List[int]` in its first line, and no import.
_IMPORTED = """
import bisect, collections, copy, datetime, functools, heapq, itertools, json, math, operator, random, re, statistics
import string, sys
from typing import *
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import ceil, comb, floor, gcd, inf, isqrt, lcm, log, log2, pi, prod, sqrt
"""
_SOLUTION = "solution"  # the program's module: tests may import it by this name


def main() -> None:
    role, *arguments = sys.argv[1:]
    sys.set_int_max_str_digits(0)
    if role == "program":
        serve_program(arguments[0], Line(int(arguments[1])))
    else:
        run_tests(Line(int(arguments[0])))
    os._exit(0)  # what the program left for its end is no part of the tests


class Line:
    """One end of the socket: a message is a line of JSON."""

    def __init__(self, descriptor: int) -> None:
        self._incoming = os.fdopen(os.dup(descriptor), "rb")
        self._outgoing = os.fdopen(descriptor, "wb")

    def send(self, message: Any) -> None:
        self._outgoing.write(json.dumps(message).encode() + b"\n")
        self._outgoing.flush()

    def receive(self) -> Any:
        """Wait for the next message and return it. Without the other process this one ends."""
        if not (line := self._incoming.readline()):
            os._exit(0)
        return json.loads(line)


def _silence() -> None:
    """Stdin is empty from now on, and what anybody prints goes nowhere."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)


# Values. Each kind is taken apart into a list or a text, and made of it again.

_KINDS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (list, list, list),
    "tuple": (tuple, list, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "deque": (deque, list, deque),
    "dict": (dict, lambda value: [*value.items()], dict),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    "bytes": (bytes, list, bytes),
    "complex": (complex, str, complex),
    "Decimal": (Decimal, str, Decimal),
    "Fraction": (Fraction, str, Fraction),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
}


def pack(value: Any, *, refer: Callable[[Any], int]) -> Any:
    """Turn a value into JSON. refer: gives the number of an object that is not plain. Those of the program's own
    classes are not, whatever they derive from; those of a library are what they derive from, and NumPy's arrays are
    lists."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is not Remote and type(value).__module__ != _SOLUTION:
        for name, (kind, take_apart, _) in _KINDS.items():
            if isinstance(value, kind):
                parts = take_apart(value)
                return {name: [pack(part, refer=refer) for part in parts] if isinstance(parts, list) else parts}
        if callable(getattr(value, "tolist", None)):
            return pack(value.tolist(), refer=refer)
    return {"object": refer(value)}


def unpack(packed: Any, *, resolve: Callable[[int], Any]) -> Any:
    if not isinstance(packed, dict):
        return packed
    ((name, parts),) = packed.items()
    if name == "object":
        return resolve(parts)
    make = _KINDS[name][2]
    return make([unpack(part, resolve=resolve) for part in parts] if isinstance(parts, list) else str(parts))


# The program's process


def serve_program(path: str, line: Line) -> None:
    line.receive()  # from now on the memory of the tests' process is closed to this one
    _silence()
    with open(path, encoding="utf-8") as file:
        source = file.read()
    sys.setrecursionlimit(_RECURSION_LIMIT)
    solution = types.ModuleType(_SOLUTION)
    sys.modules[_SOLUTION] = solution
    exec(_IMPORTED, vars(solution))
    objects = _Objects(_Names(vars(solution), imported=dict(vars(solution))))
    exec(compile(source, "main.py", "exec"), vars(solution))
    line.send("ready")
    while True:
        line.send(_reply(line.receive(), objects=objects))


class _Objects:
    """Objects of the program that its tests know by a number. They live as long as the process."""

    def __init__(self, first: Any) -> None:
        self._objects = [first]
        self._places = {id(first): 0}

    def resolve(self, place: int) -> Any:
        return self._objects[place]

    def refer(self, value: Any) -> int:
        if id(value) not in self._places:
            self._places[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._places[id(value)]


class _Names:
    """What a program has defined: the names that were imported for it are not its own."""

    def __init__(self, names: dict[str, Any], *, imported: dict[str, Any]) -> None:
        self._names, self._imported = names, imported

    def __getattr__(self, name: str) -> Any:
        if name not in self._names or (name in self._imported and self._names[name] is self._imported[name]):
            raise AttributeError(name)
        return self._names[name]


def _reply(request: Any, *, objects: _Objects) -> Any:
    """Return what a call gave: its value and the arguments that it changed, or its error."""
    try:
        name, packed, packed_by_name = request
        arguments = [unpack(argument, resolve=objects.resolve) for argument in packed]
        by_name = {key: unpack(argument, resolve=objects.resolve) for key, argument in packed_by_name.items()}
        value = (getattr(builtins, name, None) or getattr(operator, name))(*arguments, **by_name)
        after = [pack(argument, refer=objects.refer) for argument in arguments]
        changed = {place: now for place, now in enumerate(after) if now != packed[place]}
        reply = {"value": pack(value, refer=objects.refer), "changed": changed}
        json.dumps(reply)
    except BaseException as error:  # the program's: it is one in the test that called, and the others are their own
        texts = [text for text in error.args if isinstance(text, str)]
        return {"error": [kind.__name__ for kind in type(error).__mro__], "texts": texts}
    return reply


# The tests' process


class Remote:
    """An object in the program's process. What is done to it is done there, but for `==` and `in`: it is equal to
    nothing but another such object, and nobody asks what it contains."""

    __slots__ = ("_ask", "_place")
    _ask: Callable[..., Any]
    _place: int

    def __init__(self, ask: Callable[..., Any], place: int) -> None:
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_place", place)

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is Remote and self._ask("eq", self, other) is True)

    __hash__ = object.__hash__
    __contains__ = None

    def __instancecheck__(self, value: object) -> bool:
        return self._ask("isinstance", value, self) is True


def _forwards(function: str) -> Callable[..., Any]:
    def method(self: Remote, *arguments: Any, **by_name: Any) -> Any:
        return self._ask(function, self, *arguments, **by_name)

    return method


for _name in ("call", "getattr", "setattr", "getitem", "setitem", "delitem", "len", "bool", "iter", "next", "str"):
    setattr(Remote, f"__{_name}__", _forwards(_name))
Remote.__repr__ = _forwards("repr")  # type: ignore[method-assign]


class _Program:
    """The program as its tests see it."""

    def __init__(self, line: Line, *, fault: Callable[[str], None]) -> None:
        """fault: called with what a test does that cannot be done from here."""
        self._line, self._fault = line, fault
        self._remotes: dict[int, Remote] = {}
        self.names = self._resolve(0)
        line.send("begin")
        line.receive()

    def _resolve(self, place: int) -> Remote:
        if type(place) is not int:
            raise TypeError("the program's process has sent no number of an object")
        return self._remotes.setdefault(place, Remote(self._ask, place))

    def _refer(self, value: Any) -> int:
        if type(value) is not Remote:
            self._fault(f"a test gives the program an object of type `{type(value).__name__}`")
        return value._place

    def _ask(self, function: str, *arguments: Any, **by_name: Any) -> Any:
        """Ask the program. Raises what it raises, as the nearest of Python's own errors."""
        packed = [pack(argument, refer=self._refer) for argument in arguments]
        packed_by_name = {name: pack(argument, refer=self._refer) for name, argument in by_name.items()}
        self._line.send([function, packed, packed_by_name])
        reply = self._line.receive()
        if "error" in reply:
            kinds = [getattr(builtins, str(name), None) for name in reply["error"]]
            raise next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception))(
                *map(str, reply["texts"])
            )
        for place, now in reply["changed"].items():
            _change(arguments[int(place)], unpack(now, resolve=self._resolve))
        return unpack(reply["value"], resolve=self._resolve)

    def defined(self, name: str) -> Any:
        """The function of the program, or the method of its class `Solution`."""
        try:
            return getattr(self.names, name)
        except AttributeError:
            return getattr(self.names.Solution(), name)


def _change(value: Any, now: Any) -> None:
    """Make a test's own list, dict or set what the program made of it."""
    if type(value) is type(now) and isinstance(value, list | deque):
        value.clear()
        value.extend(now)
    elif type(value) is type(now) and isinstance(value, dict | set):
        value.clear()
        value.update(now)


def run_tests(line: Line) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    tests = json.loads(sys.stdin.buffer.read())
    answers = Line(os.dup(1))
    _silence()

    def fault(why: str) -> None:
        answers.send({"place": place, "fault": why})
        os._exit(0)

    place = 0
    program = _Program(line, fault=fault)
    solution = types.ModuleType(_SOLUTION)
    vars(solution)["__getattr__"] = lambda name: getattr(program.names, name)
    sys.modules[_SOLUTION] = solution
    for place, test in enumerate(tests):
        answers.send({"place": place})
        try:
            value = _result(program, test)
            answers.send({"place": place, "value": value})
        except BaseException:  # the program's, or an assert's: the test has failed, and the others are their own
            continue


def _result(program: _Program, test: dict[str, Any]) -> Any:
    """Return what the function returns, None of statements. Raises what the program or an assert raises."""
    if "function" in test:
        return program.defined(test["function"])(*test["arguments"])
    names: dict[str, Any] = {"__name__": "tests"}
    exec(_IMPORTED, names)
    tree = ast.parse(test["statements"])
    wanted = _names_of_program(tree, imported={*names})
    defined = {name: getattr(program.names, name) for name in wanted if hasattr(program.names, name)}
    if wanted and not defined:
        raise NameError("the program defines nothing that the test uses")
    exec(compile(tree, "test.py", "exec"), names | defined)
    return None


def _names_of_program(tree: ast.Module, *, imported: set[str]) -> set[str]:
    """Return the names that statements take from the program: none that Python has or a judge has imported, for a
    program could define an `abs` that is always 0. Where the statements use no others, and do not import the program,
    the program defines one of these."""
    used: set[str] = set()
    bound: set[str] = set()
    imports_program = False
    for node in ast.walk(tree):
        match node:
            case ast.Name():
                (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
            case ast.arg():
                bound.add(node.arg)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                bound.add(node.name)
            case ast.alias():
                bound.add(node.asname or node.name.partition(".")[0])
                imports_program |= node.name == _SOLUTION
            case ast.ImportFrom():
                imports_program |= node.module == _SOLUTION
            case ast.ExceptHandler(name=str(name)):
                bound.add(name)
    free, of_python = used - bound, {*dir(builtins)}
    others = free - imported - of_python
    return others if others or imports_program else free & imported - of_python or free & of_python


if __name__ == "__main__":
    main()

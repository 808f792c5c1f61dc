"""Runs a program and tests of it, one after the other: `python -I -B code_child.py PROGRAM`.

It imports nothing of ours. On stdin it takes JSON, `{"key": ..., "tests": [...]}`.

A test is `{"function": ..., "arguments": [...]}` or `{"statements": ...}`. When one begins, a line says the key and the
test's place; when it ends well, another one these and what the function returned, as JSON. They go to what was stdout:
what the program prints goes nowhere, and a program that ends the process has given no answer.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import IO, Any

_RECURSION_LIMIT = 50_000  # that of judges is higher than Python's
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


def main() -> None:
    asked = json.loads(sys.stdin.buffer.read())
    answers = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    with open(sys.argv[1], encoding="utf-8") as file:
        source = file.read()
    sys.setrecursionlimit(_RECURSION_LIMIT)
    solution = types.ModuleType("solution")  # tests may import it by this name
    sys.modules["solution"] = solution
    exec(_IMPORTED, vars(solution))
    exec(compile(source, "main.py", "exec"), vars(solution))
    for place, test in enumerate(asked["tests"]):
        _say(f"{asked['key']} {place}", to=answers)
        try:
            returned = json.dumps(_result(solution, test), default=_plain)
        except BaseException:  # the program's: the test has failed, and the others are their own
            continue
        _say(f"{asked['key']} {place} {returned}", to=answers)
    os._exit(0)  # what the program left for its end is no part of the tests


def _say(line: str, *, to: IO[str]) -> None:
    to.write(f"{line}\n")
    to.flush()


def _result(solution: types.ModuleType, test: dict[str, Any]) -> Any:
    """What the function returns, None of statements. Raises what the program or an assert raises."""
    if "function" in test:
        return _callable(solution, test["function"])(*test["arguments"])
    exec(compile(test["statements"], "test.py", "exec"), vars(solution))
    return None


def _callable(solution: types.ModuleType, name: str) -> Any:
    """The function of the program, or the method of its class `Solution`."""
    if hasattr(solution, name):
        return getattr(solution, name)
    return getattr(solution.Solution(), name)


def _plain(value: Any) -> Any:
    """NumPy's arrays and numbers as Python's. Raises AttributeError for what is no value of JSON."""
    return value.tolist()


if __name__ == "__main__":
    main()

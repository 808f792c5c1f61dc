"""Runs a program and one test of it, alone in its process: `python -I -B code_child.py PROGRAM`, the test as JSON on
stdin. It imports nothing of ours.

The test is `{"key": ..., "function": ..., "arguments": [...]}` or `{"key": ..., "statements": ...}`. The answer is a
line of the key and of what the function returned, as JSON. It goes to what was stdout: what the program prints goes
nowhere, and a program that ends the process has given no answer.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any

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
    test = json.loads(sys.stdin.buffer.read())
    answer = os.fdopen(os.dup(1), "w")
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
    returned = None
    if function := test.get("function"):
        returned = _callable(solution, function)(*test["arguments"])
    else:
        exec(compile(test["statements"], "test.py", "exec"), vars(solution))
    answer.write(f"{test['key']} {json.dumps(returned, default=_plain)}\n")
    answer.flush()
    os._exit(0)  # what the program left for its end is no part of the test


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

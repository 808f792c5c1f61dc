"""The reward `code`: which part of a response is the program, which tests a truth holds, and how they are run."""

from __future__ import annotations

import ctypes
import json
import os
import time
from pathlib import Path

import pytest

from appliance.tasks import code as code_file
from appliance.tasks.code import code, program_of
from appliance.tasks.code_tests import read_tests
from appliance.tasks.task import Response


def graded(program: str, truth: object) -> float:
    return code(Response(program, truth if isinstance(truth, str) else json.dumps(truth)))


TESTS = json.dumps([{"input": "1 2\n", "output": "3"}, {"input": "5 5", "output": "10\n"}])
SUM = "print(sum(map(int, input().split())))"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "value"),
    [
        (SUM, 1.0),
        (f"Like this:\n```python\nprint(0)\n```\nor rather\n```python\n{SUM}\n```\nDone.", 1.0),
        (f"For\n```text\n1 2\n```\nthis:\n```Python3 main.py\n{SUM}\n```\nIt prints\n```text\n3\n```", 1.0),
        (f"As ```a + b``` says\n```python\n{SUM}\n```", 1.0),
        (f"So: ```py\n{SUM}```", 1.0),
        (f"1. Read.\n\n   ```python\n   if True:\n       {SUM}\n   ```\n2. Done.", 1.0),
        (f"1. ```python\n   if True:\n\n       {SUM}\n   ```\n- ```text\n  3\n  ```", 1.0),
        (f"1. Read.\n   ```python\nif True:\n  {SUM}\n   ```\n2. Done.", 1.0),
        (f"```python\n    {SUM}\n```", 0.0),
        ("print(3)", 0.5),
        ("print(", 0.0),
        (f"{SUM}\nraise SystemExit(1)", 0.0),
        (f"import os\nos.fork()\n{SUM}", 0.0 if os.getuid() else None),
        ("x = bytearray(3 << 30)", 0.0),
        ("open('x', 'wb').write(bytes(32 << 20))\nprint(3)", 0.0),
        (f"import os\nassert 'HF_TOKEN' not in os.environ and not set(os.listdir()) - {{'main.py'}}\n{SUM}", 1.0),
        ("import sys\nfor _ in range(10 ** 9): sys.stdout.write('x' * 10 ** 6)", 0.0),
    ],
)
def test_code_is_run_on_each_test_within_limits(
    monkeypatch: pytest.MonkeyPatch, program: str, value: float | None
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    found = graded(program, TESTS)
    assert value is None or found == value


@pytest.mark.slow
def test_code_that_never_ends_fails_its_tests_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_file, "CODE_S", 1.0)
    started = time.monotonic()
    program = f"import os\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\nwhile True: pass"
    assert graded(program, TESTS) == 0.0
    assert time.monotonic() - started < 60
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


@pytest.mark.parametrize("opening", ["```" + "a" * 50_000, "```" + " " * 50_000, " " * 50_000, "-" + " " * 50_000])
def test_a_block_that_never_opens_is_read_once(opening: str) -> None:
    """Backwards again and again it takes half a minute."""
    before_s = time.process_time()
    assert code_file._FENCED.findall(opening) == []
    assert time.process_time() - before_s < 5


def test_code_takes_tests_as_two_lists() -> None:
    assert graded(SUM, json.dumps({"inputs": ["1 2", "1 1"], "outputs": ["3", "3"]})) == 0.5


# Which part is the program

PRINT = "```python\nprint(1)\n```"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (f"{PRINT}\nIt prints:\n```\n2\n```", "print(1)\n"),
        (f"{PRINT}\nIt prints:\n```text\n2\n```", "print(1)\n"),
        (f"```python\nprint(0)\n```\nbetter:\n{PRINT}\nso\n```\n2\n```", "print(1)\n"),
        (f"```\n2\n```\n{PRINT}\n```cpp\nint main() {{}}\n```", "print(1)\n"),
        ("```\nprint(0)\n```\nor\n```\nprint(1)\n```", "print(1)\n"),
        ("```py3\nprint(1)\n```", "print(1)\n"),
        ("```python:main.py\nprint(1)\n```", "print(1)\n"),
        ("```{.python .numberLines}\nprint(1)\n```", "print(1)\n"),
        ("~~~python\nprint(1)\n~~~", "print(1)\n"),
        ("````python\nprint('```')\n````", "print('```')\n"),
        ("```cpp\nint main() {}\n```", ""),
        ("```javascript\nconsole.log(1)\n```\n```cpp\nint main() {}\n```", ""),
        ("```pycon\n>>> 1\n```", ""),
        (f"<think>```python\nprint(0)\n```</think>{PRINT}", "print(1)\n"),
        ("<think>```python\nprint(0)\n```</think>\n```\nprint(1)\n```", "print(1)\n"),
        ("<think>```python\nprint(0)\n```</think>\nprint(1)", "\nprint(1)"),
        (f"<think>hm</think><answer>{PRINT}</answer>", "print(1)\n"),
        ("<think>hm</think><answer>print(1)</answer>", "print(1)"),
        ("print(1)", "print(1)"),
    ],
)
def test_the_labelled_block_is_the_program(text: str, program: str) -> None:
    assert program_of(text) == program


# Which tests a truth holds

FORMS = {
    "APPS, TACO": {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]},
    "another name for the function": {"method_name": "add", "inputs": ["1\n2"], "outputs": ["3"]},
    "APPS, each answer in a list": {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]},
    "LiveCodeBench": [
        {"input": "1\n2", "output": "3", "testtype": "functional", "metadata": json.dumps({"func_name": "add"})}
    ],
    "PrimeIntellect": {
        "language": "python",
        "test_cases": [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}],
    },
    "MBPP": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
    "MBPP, an object": {"test_list": ["assert add(one, 2) == 3"], "test_setup_code": "one = 1"},
    "MBPP, a text": "import math\nassert add(1, math.ceil(1.5)) == 3",
    "HumanEval": {"test": "def check(candidate):\n    assert candidate(1, 2) == 3\n", "entry_point": "add"},
    "HumanEval, called": "def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)",
    "pytest": "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n",
}
RIGHT = "def add(a, b):\n    return a + b\n"
IN_CLASS = "class Solution:\n    def add(self, a: int, b: Optional[int]) -> int:\n        return a + b\n"


@pytest.mark.slow
@pytest.mark.parametrize("truth", FORMS.values(), ids=FORMS)
def test_tests_of_every_form_are_run_as_what_they_are(truth: object) -> None:
    assert graded(f"```python\n{RIGHT}```", truth) == 1.0
    assert graded(RIGHT.replace("+", "-"), truth) < 1.0
    assert graded("print(3)", truth) == 0.0
    for program in ("raise SystemExit(0)", "import os\nos._exit(0)", f"print(3)\n{RIGHT}\nimport os\nos._exit(0)"):
        assert graded(program, truth) == 0.0  # it ends well, and no test was run


@pytest.mark.slow
def test_a_method_of_a_solution_is_called_with_typing_imported() -> None:
    truth = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 8]}
    assert graded(IN_CLASS, truth) == 0.5
    checked = {"test": "def check(candidate):\n    assert candidate(a=1, b=2) == 3\n", "entry_point": "Solution().add"}
    assert graded(IN_CLASS, checked) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("returned", "wanted", "value"),
    [
        ("(1, [2, 3])", [1, [2, 3]], 1.0),
        ("0.1 + 0.2", 0.3, 1.0),
        ("0.31", 0.3, 0.0),
        ("2.0", 2, 1.0),
        ("True", True, 1.0),
        ("1", True, 0.0),
        ("{1: 'a'}", {"1": "a"}, 1.0),
        ("'3'", 3, 0.0),
        ("None", None, 1.0),
        ("[3]", 3, 0.0),
        ("{1, 2}", [1, 2], 0.0),
        ("10 ** 400", 10**400, 1.0),
        ("10 ** 9999", 1, 0.0),
        ("eval('[' * 80 + ']' * 80)", [], 0.0),
        ("functools.reduce(lambda value, _: [value], range(20000), 1)", [], 0.0),
    ],
)
def test_what_a_function_returns_is_compared_as_json(returned: str, wanted: object, value: float) -> None:
    assert graded(f"def f():\n    return {returned}", {"fn_name": "f", "inputs": [[]], "outputs": [wanted]}) == value


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        (
            [{"input": "1", "output": "2", "testtype": "functional"}],
            "its tests are calls of a function, and no `fn_name` beside them says of which one",
        ),
        (
            {"inputs": [[1, 2]], "outputs": [3]},
            "`inputs` is `[1, 2]`, which is not text, and no `fn_name` says that the tests are calls",
        ),
        (
            [{"input": "1", "output": 2}],
            "`output` is `2`, which is not text, and no `fn_name` says that the tests are calls",
        ),
        (
            {"inputs": ["1", "2"], "outputs": ["3"]},
            "`inputs` has 2 entries and `outputs` 1: each test needs one of both",
        ),
        ({"inputs": "1", "outputs": ["3"]}, '`inputs` is `"1"`, but must be a list with an entry for each test'),
        (
            [{"input": "1", "output": "1"}, {"input": "1"}],
            "test 2 of 2 has none of the known forms, and other tests have one",
        ),
        (
            "import pytest\n@pytest.mark.parametrize('a,b', [(1, 2)])\ndef test_a(a, b):\n    assert f(a) == b",
            "the test function `test_a` has a decorator: make a function of each case, `def test_a_1():`",
        ),
        (
            "def test_a(tmp_path):\n    assert f(1) == 2",
            "the test function `test_a` has parameters: make a function of each case, `def test_a_1():`",
        ),
        (
            "async def test_a():\n    assert f(1) == 2",
            "the test function `test_a` is no plain function: make a function of each case, `def test_a_1():`",
        ),
        (
            "import unittest\nclass TestF(unittest.TestCase):\n    def test_a(self):\n        assert f(1)",
            "its tests are methods of the class `TestF`: make each a function `test_...()`",
        ),
        ({"fn_name": 5, "inputs": [[1]], "outputs": [3]}, "`fn_name` is `5`, which names no function"),
        (
            {"fn_name": "f", "inputs": [{"a": 1}], "outputs": [3]},
            "`inputs` is an object, and a call of `f` takes a list of arguments",
        ),
        (
            {"fn_name": "f", "inputs": ["abc"], "outputs": ["1"]},
            "`inputs` of a call is the text `abc`, which is not JSON",
        ),
        (
            [{"input": "1", "output": "2", "testtype": "interactive"}],
            "`testtype` is `interactive`, neither one of `stdin`, `stdin_stdout`, `standard_input`, `stdio` nor of "
            "`functional`, `function`, `function_call`, `call_based`",
        ),
        (
            {"language": "cpp", "test_cases": [{"type": "stdin_stdout", "input": "1", "output": "2"}]},
            "`language` is `cpp`, and only programs in Python are run",
        ),
        (
            {"test": "def check(candidate):\n    assert candidate(1)"},
            "it has `check(candidate)`, and no `entry_point` beside `test` names what is checked",
        ),
        ("def f(): pass", "the truth `def f(): pass` has no tests"),
        ("if __name__ == '__main__':\n    assert f(1)", "the truth `if __name__"),
        ("42", "the truth `42` has no tests"),
    ],
)
def test_tests_that_cannot_be_run_are_refused_by_their_field(truth: object, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        read_tests(truth if isinstance(truth, str) else json.dumps(truth))
    assert str(raised.value).startswith(message)


def test_a_type_that_is_of_something_else_and_a_helper_that_is_called_test_refuse_nothing() -> None:
    assert len(read_tests(json.dumps([{"input": "1", "output": "1", "type": "train"}]))) == 1
    assert (
        len(read_tests("def test_one(a):\n    assert f(a)\n\ndef test_all(x=1):\n    test_one(1)\n    test_one(2)"))
        == 1
    )


@pytest.mark.slow
def test_a_call_that_ends_the_process_or_raises_is_one_that_failed() -> None:
    truth = {"fn_name": "f", "inputs": [[number] for number in range(8)], "outputs": [*range(8)]}
    ends = "import os, sys\ndef f(a):\n    if a == 2: os._exit(0)\n    if a == 3: raise ValueError\n"
    assert (
        graded(f"{ends}    if a == 5: sys.exit(0)\n    if a == 7: os.kill(os.getpid(), 9)\n    return a", truth) == 0.5
    )
    assert graded("import os\ndef f(a): return os._exit(0)", truth) == 0.0


@pytest.mark.slow
def test_many_calls_are_one_process_and_one_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    start = code_file.subprocess.Popen
    monkeypatch.setattr(
        code_file.subprocess, "Popen", lambda *args, **given: started.append(args) or start(*args, **given)
    )
    truth = {"fn_name": "f", "inputs": [[number] for number in range(200)], "outputs": [*range(200)]}
    assert graded("def f(a):\n    print(a)\n    return a", truth) == 1.0
    assert len(started) == 2


@pytest.mark.slow
def test_a_call_that_never_ends_costs_those_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_file, "CODE_S", 2.0)
    truth = {"fn_name": "f", "inputs": [[number] for number in range(4)], "outputs": [*range(4)]}
    assert graded("def f(a):\n    while a == 2: pass\n    return a", truth) == 0.5


@pytest.mark.slow
def test_tests_of_two_forms_in_one_list_are_each_run_as_theirs() -> None:
    tests = [{"input": "1 2", "output": "3", "testtype": "stdin"}, {"input": ["1 1"], "output": ["2"], "type": "stdin"}]
    assert graded(SUM, tests) == 1.0
    called = {"input": "1\n2", "output": "3", "testtype": "functional", "fn_name": "add"}
    assert graded(RIGHT, [tests[0], called]) == 0.5
    assert graded(f"{RIGHT}\nif __name__ == '__main__':\n    {SUM}", [tests[0], called]) == 1.0


# Wrong programs that attack their tests

EQUAL_TO_ALL = """
class Same:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __sub__(self, other): return 0
    __rsub__ = __radd__ = __add__ = __mul__ = __sub__
    def __abs__(self): return 0
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __hash__(self): return 0
    def __iter__(self): return iter([self])
    def __len__(self): return 1
    def __getitem__(self, place): return self
    def __float__(self): return 3.0
"""
CHEATS = {
    "an object that is equal to all": f"{EQUAL_TO_ALL}\ndef add(a, b): return Same()",
    "a list of such objects": f"{EQUAL_TO_ALL}\ndef add(a, b): return [Same()]",
    "a number that is equal to all": "class Same(int):\n    __eq__ = lambda *_: True\ndef add(a, b): return Same()",
    "exec does nothing": "import builtins\nbuiltins.exec = lambda *_: None\ndef add(a, b): return 0",
    "compile makes nothing": (
        "import builtins\nmade = compile\nbuiltins.compile = lambda *_, **__: made('', 'a', 'exec')\n"
        "def add(a, b): return 0"
    ),
    "the functions of the child": (
        "import sys, types\nmain = sys.modules['__main__']\n"
        "for name, value in list(vars(main).items()):\n"
        "    if isinstance(value, types.FunctionType) and name != 'main': setattr(main, name, lambda *_, **__: None)\n"
        "def add(a, b): return 0"
    ),
    "what it finds in frames": (
        "import sys\n"
        "def add(a, b):\n"
        "    frame, found = sys._getframe(1), []\n"
        "    while frame:\n"
        "        found += [value for value in frame.f_locals.values() if isinstance(value, int)]\n"
        "        found += [value for value in frame.f_code.co_consts if isinstance(value, int)]\n"
        "        frame = frame.f_back\n"
        "    return int('3') if int('3') in found else 0"
    ),
    "all tests said to be passed": (
        "import os\n"
        "for fd in range(3, 64):\n"
        "    for place in range(4):\n"
        '        try: os.write(fd, b\'{"place": %d, "value": null}\\n\' % place)\n'
        "        except OSError: pass"
    ),
    "functions that tests use": (
        "abs = lambda _: 0\nsum = len = round = abs\nisinstance = all = any = lambda *_: True\n"
        "class math: isclose = isinstance\nassertEqual = isclose = isinstance\nlist = sorted = set = lambda _: [3]\n"
        "def add(a, b): return 0"
    ),
    "an assertion error that is none": (
        "import builtins\nclass AssertionError(Exception):\n    def __new__(*_): raise SystemExit(0)\n"
        "builtins.AssertionError = AssertionError\ndef add(a, b): raise SystemExit(0)"
    ),
    "the tests' own process": (
        "import glob, os\n"
        "for path in glob.glob('/proc/[0-9]*/fd/1'):\n"
        "    if os.path.realpath(path).startswith(os.getcwd()):\n"
        "        open(path, 'a').write('{\"place\": 0, \"value\": null}\\n')\n"
        "def add(a, b): return 0"
    ),
}
ATTACKED = {
    "a literal": ["assert add(1, 2) == 3"],
    "a literal first": ["assert 3 == add(1, 2)"],
    "no other value": ["assert not add(1, 2) != 3"],
    "nearly": ["assert abs(add(1, 2) - 3) < 1e-6"],
    "close": ["import math\nassert math.isclose(add(1, 2), 3)"],
    "in a list": ["assert [add(1, 2)] == [3]"],
    "one of several": ["assert add(1, 2) in (3, 3.0)"],
    "of a list": ["assert list(add([1], [2])) == [1, 2]"],
    "HumanEval": {"test": "def check(candidate):\n    assert candidate(1, 2) == 3\n", "entry_point": "add"},
    "pytest": "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n",
    "a call": {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]},
}


@pytest.mark.slow
@pytest.mark.parametrize("cheat", CHEATS)
def test_no_attack_on_its_tests_earns(cheat: str) -> None:
    """Right programs earn by each of these tests."""
    passed = {form: graded(CHEATS[cheat], truth) for form, truth in ATTACKED.items()}
    assert passed == dict.fromkeys(ATTACKED, 0.0)


@pytest.mark.slow
def test_the_attacked_tests_are_passed_by_a_right_program() -> None:
    assert {form: graded(RIGHT, truth) for form, truth in ATTACKED.items()} == dict.fromkeys(ATTACKED, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("truth", [["assert gcd(4, 6) == 2"], {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}])
def test_what_a_judge_has_imported_answers_for_no_program(truth: object) -> None:
    assert graded("print(2)", truth) == 0.0
    assert graded("def gcd(a, b):\n    return b and gcd(b, a % b) or a", truth) == 1.0
    assert graded("def gcd(a, b):\n    return 1", truth) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(): return (1, [2.5], {'a': {3}}, b'4', None, 1j)", "f() == (1, [2.5], {'a': {3}}, b'4', None, 1j)"),
        ("def f(): return Counter('aab')", "f() == {'a': 2, 'b': 1}"),
        ("def f(): return deque([1, 2])", "f() == deque([1, 2])"),
        ("from fractions import Fraction\ndef f(): return Fraction(1, 3)", "3 * f() == 1"),
        ("def f(): return datetime.date(2024, 2, 29)", "f() == datetime.date(2024, 2, 29)"),
        ("def f(a): return sum(a)", "f(range(4)) == 6"),
        ("def f(): return float('inf')", "f() == inf"),
        ("def f(): return 10 ** 5000", "f() == 10 ** 5000"),
        ("def f():\n    yield 1\n    yield 2", "list(f()) == [1, 2]"),
        ("def f(): return lambda a: a + 1", "f()(1) == 2"),
    ],
)
def test_plain_values_reach_the_tests_as_they_are(program: str, test: str) -> None:
    assert graded(program, [f"assert {test}"]) == 1.0
    assert graded(program, [f"assert not {test}"]) == 0.0


OF_CLASSES = """
import solution
from solution import Stack

def test_methods():
    stack = Stack()
    stack.push(1)
    assert len(stack) == 1 and stack and stack[0] == 1 and stack.items == [1]
    assert stack.pop() == 1 and not stack
    assert isinstance(stack, Stack) and Stack() != stack

def test_errors():
    try:
        solution.Stack().pop()
    except IndexError as error:
        assert str(error) == "empty"
    else:
        assert False

def test_arguments_that_change():
    numbers = [3, 1]
    assert sort(numbers) is None and numbers == [1, 3]

def test_attributes():
    stack = Stack()
    stack.name = "a"
    assert stack.name == "a"
"""
STACK = """
class Stack:
    def __init__(self): self.items = []
    def __len__(self): return len(self.items)
    def __getitem__(self, place): return self.items[place]
    def push(self, item): self.items.append(item)
    def pop(self):
        if not self.items: raise IndexError("empty")
        return self.items.pop()
def sort(numbers): numbers.sort()
"""


@pytest.mark.slow
def test_tests_may_use_objects_of_the_program_change_arguments_and_expect_errors() -> None:
    assert graded(STACK, OF_CLASSES) == 1.0
    assert graded(STACK.replace("self.items.pop()", "0").replace('"empty"', '"none"'), OF_CLASSES) == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("imports", ["from solution import add", "import solution\nadd = solution.add"])
def test_tests_that_import_the_program_use_what_python_has(imports: str) -> None:
    assert graded(RIGHT, f"{imports}\ndef test_add():\n    assert len([add(1, 2)]) == ceil(0.5)") == 1.0
    assert graded(f"ceil = len = lambda _: 0\n{RIGHT}", f"{imports}\ndef test_add():\n    assert len([1]) == 0") == 0.0


@pytest.mark.slow
def test_the_memory_of_what_tests_and_grades_is_closed_to_other_processes() -> None:
    """But to those of root."""
    is_dumpable = "CDLL(None).prctl(3, 0, 0, 0, 0)"
    assert graded(RIGHT, [f"from ctypes import CDLL\nassert add({is_dumpable}, 0) == 0"]) == 1.0
    assert ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0


@pytest.mark.slow
def test_a_test_that_no_program_can_pass_is_a_fault() -> None:
    with pytest.raises(ValueError) as raised:
        graded("def f(g): return g(1)", ["assert f(lambda a: a) == 1"])
    assert str(raised.value) == (
        "a test gives the program an object of type `function`, and the program takes plain values only"
    )

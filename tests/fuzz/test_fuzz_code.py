"""Code of the user's, made up: reward functions, tools, chat templates. Each is taken, or refused in a line that names
its file, by the launcher, which itself imports, compiles and executes nothing of it."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from fuzz_fork import MAY, Forked
from fuzz_surface import attempt, fuzzed
from fuzz_text import broken, raw, wild_text
from hypothesis import strategies as st
from plans import make_plan, make_reward, with_own_task

from appliance.errors import RecipeError
from appliance.files import digest_of
from appliance.finding import fault
from appliance.preflight import inputs
from appliance.record.plan import CodeFile, RunPlan
from appliance.tasks import tools, user_code
from appliance.tasks.prepare import prompt_ids
from appliance.tasks.rows import Problem
from appliance.tasks.tiny_model import CHAT_TEMPLATE, TOOL_TEMPLATE, save_tokenizer
from appliance.tasks.tools import ToolsRequest, read_tools, template_problem

QUIET_S, PATIENT_S = 0.5, 60.0  # of a program that never ends; and of one that should have ended, on a busy machine


@pytest.fixture
def forks(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch  # in each child it is there: of 3,000 each would take seconds  # noqa: F401
    from transformers.utils import get_json_schema  # noqa: F401

    popen = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(user_code, "subprocess", popen)
    monkeypatch.setattr(tempfile, "tempdir", str(room))


# Reward functions


class Part(NamedTuple):
    """Of a program. says: what is said of it where it is a fault."""

    text: str
    says: str = ""


UNPRINTABLE = "class E(Exception):\n    def __str__(self): raise ValueError\n"
LINE = " (rewards.py, line "
RAISES = [
    Part("raise ValueError('no')", f"ValueError: no{LINE}"),
    Part("raise ValueError", f"ValueError: no message{LINE}"),
    Part("raise ValueError('a\\x1b[2J\\nb')", f"ValueError: a\x1b[2J{LINE}"),
    Part("raise ValueError('a' * 9999)", f"aaa{LINE}"),
    Part("1 / 0", f"ZeroDivisionError: division by zero{LINE}"),
    Part("import no_such_module", f"ModuleNotFoundError: No module named 'no_such_module'{LINE}"),
    Part(f"{UNPRINTABLE}raise E", "E: its message cannot be made"),
    Part("def g(n): return g(n + 1)\ng(0)", "RecursionError: maximum recursion depth exceeded"),
    Part("import sys\nsys.exit('bye')", f"SystemExit: bye{LINE}"),
    Part("raise KeyboardInterrupt", "its process ended with 1: "),
    Part("raise BaseException('no')", "its process ended with 1: "),
    Part("import os\nos._exit(5)", "its process ended with 5: "),
    Part("import os\nos.kill(os.getpid(), 9)", "its process ended with -9: "),
    Part("import os\nos.closerange(3, 99)\nraise ValueError", "its process ended with 1: "),
    Part("import sys\nint(sys.stdin.readline())", f"ValueError: invalid literal for int() with base 10: ''{LINE}"),
    Part("while True: pass", "no end after 1 s"),
]
HARMLESS = [
    "import torch",
    "print('said')",
    "import os\nos.write(1, b'{\"verdict\": 1}\\n')",
    "import os\nos.write(2, b'caf\\xe9\\n')",
    "import os\nos.write(2, ('x' + '漢' * 3000).encode())",
    "import os\nos.write(2, ('xx' + '漢' * 3000).encode())",
    "import os, sys\nsys.stdin.read(), os.read(0, 9)",
    "import os\nos.fork()",
    "import os\nos.close(1)\nos.open(os.devnull, os.O_WRONLY)",
    "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()",
    "import subprocess\nsubprocess.Popen(['sleep', '600'])",
    "import atexit\natexit.register(print, 'bye')",
    "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "import sys\nsys.stdout = sys.stderr = None",
    "import sys\nsys.setrecursionlimit(5000)",
    "import warnings\nwarnings.warn('odd')",
]
NO_FORM = "is none of the three forms of a reward: "
HEADS = {
    "ours": [
        "def f(response, truth, *, row):",
        "def f(response):",
        "def f(truth, response, row=None, **_):",
        "async def f(response: str, truth: 'str' = '') -> float:",
        "def f(response, *, messages):",
    ],
    "trls": [
        "def f(prompts, completions, completion_ids, **columns):",
        "def f(completions, answer):",
        "async def f(prompts, completions=None, of=1.0):",
    ],
    "verls": [
        "def f(data_source, solution_str, ground_truth, extra_info=None):",
        "def f(solution_str, ground_truth, method='strict'):",
        "def f(solution_str, **_):",
    ],
}
NO_HEADS = [
    Part("def f(text):", NO_FORM),
    Part("def f(*_):", NO_FORM),
    Part("def f():", NO_FORM),
    Part("def f(response, /):", NO_FORM),
    Part("def f(response, reference):", NO_FORM),
    Part("async def f(solution_str, tokenizer, **_):", NO_FORM),
    Part("class f:\n  def __init__(self, x):", NO_FORM),
    Part("f = len\ndef g():", NO_FORM),
    Part("f = dict\ndef g():", "does not say what it takes; a reward is one of "),
    Part("f = 3\ndef g():", "there is no function `f` in it"),
    Part("def g(response, truth):", "there is no function `f` in it"),
    Part("def f(completions, colour):", "wants `colour`, which the row does not have"),
]
NO_NUMBER = "the reward `f` returned "
NUMBERS = ["1.0", "True", "0", "-3.5", "1e14", "5e-324", "__import__('fractions').Fraction(1, 3)"]
NUMBERS += ["__import__('decimal').Decimal(1)", "__import__('torch').tensor(1.0)", "__import__('numpy').bool_(True)"]
ODD = "type('R', (), {'__repr__': lambda self: 1 / 0})()"
NO_NUMBERS = [
    *(Part(text, NO_NUMBER) for text in ("'1'", "b'1'", "float('nan')", "float('inf')", "10 ** 400", "object()", "1j")),
    *(Part(text, NO_NUMBER) for text in ("{1}", "f", "(x for x in 'a')", "__import__('numpy').complex64(1)")),
    *(Part(text, NO_NUMBER) for text in ("__import__('torch').ones(2)", "'x' * 9999", "'a\\nb'")),
    Part(ODD, f"ZeroDivisionError: division by zero{LINE}"),
    Part("2e15", "the rewards add up to 2e+15, which is not within ±1e+15"),
    Part("None", "returned None to the truth of row 1, so no reward applies to it"),
]
SHAPES = {
    "ours": [Part("{}"), Part("[{}]", NO_NUMBER), Part("{{'score': {}}}", NO_NUMBER)],
    "trls": [Part("[{}]"), Part("({},)"), Part("[{}] * 2", "a list of 2 for one"), Part("{{}}", " for one completion")],
    "verls": [Part("{}"), Part("{{'score': {}}}"), Part("{{'acc': {}}}", "returned a mapping without `score`")],
}


@st.composite
def rewards(draw: st.DrawFn) -> Part:
    """A program that has at most one of each kind of faults, and what is said of the first that is met."""
    some = st.integers(0, 3)
    before = draw(st.lists(st.sampled_from(HARMLESS), max_size=2))
    at_import = draw(st.sampled_from(RAISES)) if draw(some) == 0 else Part("")
    form = draw(st.sampled_from(sorted(HEADS)))
    head = draw(st.sampled_from(NO_HEADS)) if draw(some) == 0 else Part(draw(st.sampled_from(HEADS[form])))
    in_call = draw(st.sampled_from(RAISES)) if draw(some) == 0 else Part(draw(st.sampled_from(HARMLESS)))
    number = draw(st.sampled_from(NO_NUMBERS)) if draw(some) == 0 else Part(draw(st.sampled_from(NUMBERS)))
    shape = SHAPES[form][0] if number.text == ODD else draw(st.sampled_from(SHAPES[form]))
    body = "\n".join(f"    {line}" for line in f"{in_call.text}\nreturn {shape.text.format(number.text)}".splitlines())
    text = "\n".join([*before, at_import.text, head.text, body])
    says = next((each.says for each in (at_import, head, in_call, shape, number) if each.says), "")
    return Part(text + "\n", says)


@pytest.fixture
def plan(room: Path) -> RunPlan:
    rows = [{"prompt": f"{number} + 1?", "answer": str(number + 1)} for number in range(1, 4)]
    (room / "d.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    made = make_plan(room / "runs" / "a-1")
    reward = make_reward("f", file=room / "rewards.py")
    return with_own_task(made, reward, truth="answer", train_file=str(room / "d.jsonl"))


def said_of(program: bytes, plan: RunPlan, *, quiet_s: float) -> str:
    """Why it is refused; empty where it is not."""
    file = Path(plan.task.train_file).with_name("rewards.py")
    file.write_bytes(program)
    code = (CodeFile(path=str(file), copy_name=file.name, sha256=digest_of(file)),)
    task, files = plan.task.replace(reward_timeout_s=quiet_s), plan.task_files.replace(code=code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "_STARTS_WITHIN_S", quiet_s)
        found = inputs.reward_problem(plan.replace(task=task, task_files=files))
    return found.message if found and not found.is_rare else ""


def checked(program: bytes, plan: RunPlan, *, says: str | None) -> None:
    """says: None: whatever it is."""
    message = said_of(program, plan, quiet_s=QUIET_S)
    if "no end after" in message and "no end" not in (says or ""):
        message = said_of(program, plan, quiet_s=PATIENT_S / 2)
    folder = Path(plan.task.train_file).parent
    assert sorted(path.name for path in folder.iterdir()) == ["d.jsonl", "rewards.py"]
    if says is not None:
        assert (says in message) if says else not message, f"{says!r} in {message!r}\n{program.decode()}"
    if message:
        assert str(folder / "rewards.py") in message and "Traceback" not in message and len(message) < 1500
        raise RecipeError([fault((), message)])


@fuzzed("reward functions", program=rewards())
def test_fuzz_reward_functions(room: Path, forks: None, plan: RunPlan, program: Part) -> None:
    content = program.text.encode()
    attempt("reward functions", lambda: checked(content, plan, says=program.says), folder=room, may=MAY)


GOOD = "import math\n\ndef f(response, truth, *, row):\n    return float(response.strip() == truth)\n"
PYTHON = ("(", ":", "\n    ", "async ", "yield ", "await ", "lambda: ", "@f\n", "*", "**_", "'''", "\\", "return", "f")


@fuzzed("broken files", content=st.one_of(raw, broken([GOOD, GOOD.replace("row", "**_")], tokens=PYTHON)))
def test_fuzz_broken_files(room: Path, forks: None, plan: RunPlan, content: bytes) -> None:
    attempt("broken files", lambda: checked(content, plan, says=None), folder=room, may=MAY)


# Tools

HINTS = ("int", "str", "float", "bool", "list[int]", "dict[str, float]", "int | None", "Any", "'int'", "None", "object")
HINTS += ("Literal['a', 3]", "tuple[int, str]", "list", "set[int]", "bytes", "type", "3", "'no such'", "Callable", "E")
HINTS += ("Optional[int]", "dict[int, list[dict]]", "tuple[()]", "Annotated[int, 'x']", "'T'", "[]", "T", "lambda: 0")
DEFAULTS = ("2", "None", "'x'", "[]", "object()", "float('nan')", "1 / 0", "...")
TYPES = "from enum import Enum\nfrom typing import *\nT = TypeVar('T')\nclass E(Enum):\n    A = 1\n"
names = st.one_of(st.sampled_from(["a", "b", "self", "tools", "é", "_x"]), st.text("abc", min_size=1, max_size=4))
words = st.one_of(st.just("A number."), wild_text)


class Tool(NamedTuple):
    """name: empty: no public one.  says: of the message, None: whatever it is."""

    name: str
    text: str
    says: str | None


@st.composite
def tool(draw: st.DrawFn, name: str) -> Tool:
    is_good = draw(st.booleans())  # by far most are not, else
    parameters = draw(st.lists(names, max_size=3, unique=True))
    hinted = {each: is_good or draw(st.integers(0, 5)) > 0 for each in parameters}
    taken, defaults = [], False
    for parameter in parameters:
        hint = f": {draw(st.sampled_from(HINTS[:4] if is_good else HINTS))}" if hinted[parameter] else ""
        defaults = defaults or draw(st.integers(0, 3)) == 0
        taken.append(
            f"{parameter}{hint}"
            + (f" = {draw(st.sampled_from(DEFAULTS[: 4 if is_good else None]))}" if defaults else "")
        )
    star = draw(st.sampled_from([""] if is_good else ["", "*_: int", "**_: int", "*, z: int"]))
    argument_lines = [f"        {each}: {draw(words)}" for each in parameters if is_good or draw(st.integers(0, 9))]
    argument_lines += ["        z: Another."] if "z" in star else []
    tail = draw(
        st.sampled_from(
            ["", "", "", "", " (choices: [1, 2])", " (choices: [)", "\n\n    Returns:\n        It.", "\n::"]
        )
    )
    doc = (
        "\n".join([draw(words), "", "    Args:", *argument_lines]) + tail if is_good or draw(st.integers(0, 5)) else ""
    )
    begins = "async def" if not is_good and draw(st.integers(0, 9)) == 0 else "def"
    odd = [] if is_good else [" -> 'no such'", " -> Iterator[int]", " -> 1 / 0"]
    returns = draw(st.sampled_from(["", " -> int", " -> str", *odd]))
    head = f"{begins} {name}({', '.join([*taken, *filter(None, [star])])}){returns}:"
    says = None
    if begins == "async def":
        says = f"{name}: a tool is a plain function, not `async`"
    elif star in ("*_: int", "**_: int"):
        says = f"{name}: a tool has named parameters only"
    elif bare := [each for each in parameters if not hinted[each]]:
        says = f"{name}: no type hint for {', '.join(bare)}"
    elif not doc.strip():
        says = f"{name}: no docstring: the model reads there what the tool is for"
    return Tool("" if name[0] == "_" else name, f"{head}\n    {doc!r}\n    return 1\n", says)


@st.composite
def tool_files(draw: st.DrawFn) -> tuple[bytes, list[Tool] | None]:
    """The text, and its tools; None where something else than a tool may be wrong with it."""
    tools = [
        draw(tool(name)) for name in draw(st.sampled_from([["f"], ["f"], ["f", "g"], ["f", "_h"], ["f"], ["_h"], []]))
    ]
    before = draw(st.lists(st.one_of(st.sampled_from(HARMLESS)), max_size=1))
    fails = [draw(st.sampled_from(RAISES)).text] if draw(st.integers(0, 9)) == 5 else []
    text = "\n".join([TYPES, *before, *fails, *(each.text for each in tools)])
    try:
        compile(text, "tools.py", "exec")
        is_whole = not fails and "1 / 0" not in text
    except (SyntaxError, ValueError):
        is_whole = False
    return text.encode(errors="surrogatepass"), tools if is_whole else None


@fuzzed("tools", made=tool_files())
def test_fuzz_tools(room: Path, forks: None, made: tuple[bytes, list[Tool] | None]) -> None:
    content, expected = made
    file = room / "tools.py"
    file.write_bytes(content)

    def ask() -> None:
        try:
            schemas = read_tools(ToolsRequest(str(file)))
        except RecipeError as error:
            messages = [message for message, _ in error.problems]
            for message in messages:
                assert message.startswith(f"task.tools: {file}: "), message
                assert "Traceback" not in message and len(message.splitlines()) == 1, message
            for each in expected or ():
                assert not each.says or not each.name or f"task.tools: {file}: {each.says}" in messages, messages
            raise
        if expected is not None:
            assert [each["function"]["name"] for each in schemas] == [each.name for each in expected if each.name]
            assert not any(each.says for each in expected if each.name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tools, "STARTS_WITHIN_S", 4 * QUIET_S)
        attempt("tools", ask, folder=room, may=MAY)
    assert [path.name for path in room.iterdir()] == ["tools.py"]


# Chat templates

SCHEMA = {"type": "function", "function": {"name": "f", "description": "x", "parameters": {"type": "object"}}}
JINJA = ("{{", "}}", "{%", "%}", "{#", "{% raw %}", "{{ 1 / 0 }}", "{{ messages[9].content }}", "{{ tools[0] }}")
JINJA += (
    "{% for m in messages %}",
    "{% endfor %}",
    "{% if %}",
    "{{ raise_exception('no') }}",
    "{{ x.y.z }}",
    "| tojson",
)
JINJA += ("{{ messages | map(attribute='x') | list }}", "{% include 'x' %}", "{% set x = x %}")
JINJA += (
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ range(999999) }}",
    "{{ 1 + 'a' }}",
)
JINJA += (
    "{{ messages[0]['content'][99] }}",
    "{{ strftime_now(3) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ {}[0] }}",
)
BOMBS = (
    "{{ 'a' * 999999999999999 }}",
    "{% for i in [1] %}" * 25 + "{% endfor %}" * 25,
    "{{ " + "(" * 999,
)  # as they are
COMPILES = frozenset({"compile", "exec", "code.__new__"})  # what jinja makes of a template; in its sandbox


@pytest.fixture
def model(room: Path) -> Iterator[Path]:
    import jinja2.debug  # at its first error  # noqa: F401

    folder = room / "model"
    tokenizer = save_tokenizer(folder, max_positions=4096, calls_tools=True)
    assert template_problem(ToolsRequest("", str(folder)), [SCHEMA]) == ""
    assert tokenizer.chat_template == TOOL_TEMPLATE
    yield folder


@fuzzed(
    "chat templates",
    content=st.one_of(
        raw, broken([TOOL_TEMPLATE, CHAT_TEMPLATE], tokens=JINJA), st.sampled_from(JINJA + BOMBS).map(str.encode)
    ),
    message=st.one_of(st.just("2 * 3?"), wild_text),
    system=st.one_of(st.none(), wild_text),
)
def test_fuzz_chat_templates(room: Path, model: Path, content: bytes, message: str, system: str | None) -> None:
    from transformers import AutoTokenizer

    (model / "chat_template.jinja").write_bytes(content)
    request, before = ToolsRequest("", str(model)), () if system is None else (("system", system),)

    def ask() -> None:
        problem = template_problem(request, [SCHEMA])
        assert problem == "" or problem.startswith(f"the chat template of {model} ")
        try:
            tokenizer = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as error:  # as `preview` has it
            raise RecipeError([fault((), str(error))]) from error
        ids = prompt_ids(Problem(message, "6", before), tokenizer=tokenizer, tools=[SCHEMA])
        assert all(isinstance(each, int) for each in ids)

    attempt("chat templates", ask, folder=room, may=COMPILES)

"""The built-in rewards of a task of the user's own."""

from __future__ import annotations

import contextlib
import json
import math as numbers
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from plans import make_files, make_own_task, make_reward

from appliance.tasks import rewards
from appliance.tasks.maths.notation import joined_numbers, plain_numbers
from appliance.tasks.rewards import BUILT_IN, load_rewards
from appliance.tasks.task import Response


def graded(name: str, text: str, truth: str = "", **options: object) -> object:
    task = make_own_task(make_reward(name, **options))
    (reward,) = load_rewards(task, files=make_files(), parts_of_row=lambda row: (row["prompt"], None))
    return reward.value(Response(text, truth, json.dumps({"prompt": "1+1?"})))


RIGHT_AND_WRONG = {
    "math": ("\\boxed{1/2}", "\\boxed{2}", "0.5", {}),
    "number": ("It is 1,200.", "It is 120.", "1200", {}),
    "exact": ("C", "D", "C", {}),
    "choice": ("The answer is B.", "The answer is C.", "B", {}),
    "regex": ("xaab", "xb", "a+b", {}),
    "format": ("<think>x</think><answer>y</answer>", "y", "", {}),
    "length": ("short", "x" * 100, "", {"target": 9}),
}
"""A right response, a wrong one, the truth and the options of a reward, by its name."""
GRADED_ELSEWHERE = {"code", "judge"}
"""Rewards that need a process (test_code.py) or an API (below)."""


def test_every_built_in_reward_has_a_right_and_a_wrong_response() -> None:
    assert RIGHT_AND_WRONG.keys() | GRADED_ELSEWHERE == BUILT_IN.keys()


@pytest.mark.parametrize("name", RIGHT_AND_WRONG)
def test_a_right_response_earns_1_and_a_wrong_one_0(name: str) -> None:
    right, wrong, truth, options = RIGHT_AND_WRONG[name]
    assert [graded(name, text, truth, **options) for text in (right, wrong)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "truth", "value"),
    [
        ("#### 1,234", "1234", 1.0),
        ("#### 12 apples", "12", 1.0),
        ("#### 3/4", "0.75", 1.0),
        ("#### 3/4", "3", 0.0),
        ("#### \\frac{1}{2}", "0.5", 1.0),
        ("so \\boxed{x^2+1}", "1+x^2", 1.0),
        ("Answer: $\\frac{3}{6}$", "\\frac{1}{2}", 1.0),
        ("<think>#### 4</think><answer>5</answer>", "5", 1.0),
        ("<answer>\\boxed{5}</answer>", "5", 1.0),
        ("<answer>Answer: 5</answer>", "5", 1.0),
        ("<answer>#### no</answer>", "no", 1.0),
        ("#### 60 km/h", "60", 1.0),
        ("#### 1/x", "1/x", 1.0),
        ("#### 2/sin(x)", "2", 0.0),
        ("#### 2/sin x", "2", 0.0),
        ("#### 3/ab", "3", 0.0),
        ("\\boxed{4} no: \\boxed{5}", "5", 1.0),
        ("\\boxed{5} no: \\boxed{4}", "5", 0.0),
        ("I think that the answer is 5.", "5", 1.0),
        ("the area is $\\pi r^2$", "\\pi r^2", 1.0),
        ("5", "It is 2+3.\n#### 5", 1.0),
        ("\\boxed{5}", "Thus $x = \\boxed{5}$.", 1.0),
        ("", "5", 0.0),
        ("no", "5", 0.0),
        ("#### 1e5", "100000", 1.0),
        ("#### 2.5e-3 m", "0.0025", 1.0),
        ("it is 1e5", "100000", 1.0),
        ("1e5", "1", 0.0),
        ("#### 4\n#### \u22125", "-5", 1.0),
        ("\\boxed{\u20135}", "-5", 1.0),
        ("it is 1 1/2", "3/2", 1.0),
        ("it is 1", "1 1/2", 0.0),
        ("####", "5", 0.0),
        ("\\boxed{", "5", 0.0),
        ("#### " + "9" * 5000, "5", 0.0),
    ],
)
def test_math_reads_what_is_marked_and_compares_as_mathematics(text: str, truth: str, value: float) -> None:
    assert graded("math", text, truth) == value


@pytest.mark.parametrize(
    ("text", "truth", "value"),
    [
        ("it is 12, no, 1,234.50 dollars", "1234.5", 1.0),
        ("$-3", "-3", 1.0),
        ("-$3", "-3", 1.0),
        ("5-3", "3", 0.0),
        (".5", "0.50", 1.0),
        ("room A12 has 7.", "7", 1.0),
        ("none", "7", 0.0),
        ("#### 7 or 8", "so\n#### 8", 0.0),
        ("1e5", "100000", 1.0),
        ("1e5", "1", 0.0),
        ("-1.5E-7", "-0.00000015", 1.0),
        ("5", "1e-05", 0.0),
        ("$1,000e2", "100000", 1.0),
        ("1e99999", "1", 0.0),
        ("1e" + "9" * 40, "1", 0.0),
        ("12em", "12", 1.0),
    ],
)
def test_number_compares_the_last_one(text: str, truth: str, value: float) -> None:
    assert graded("number", text, truth) == value


@pytest.mark.parametrize("space", [" ", "\u00a0", "\u2009", "\u202f"])
@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("it is 1_000.", "1000"), ("-$12_345_678.50", "-12345678.5"), ("12_345 km", "12345"), ("07_000", "7000")),
        *(("3_1000", "1000"), ("1000_100", "100"), ("1_10_100", "100"), ("10_1_000", "0")),
        *(("0.5_100", "100"), ("1,000_100", "100"), ("3_100,000", "100000"), ("A3_100", "100"), ("3\n10_100", "10100")),
    ],
)
def test_a_space_joins_thousands_and_no_two_numbers(text: str, number: str, space: str) -> None:
    text = text.replace("_", space)
    assert graded("number", text, number) == 1.0


@pytest.mark.parametrize("space", ["\u00a0", "\u2009", "\u202f"])
def test_math_joins_by_the_same_spaces(space: str) -> None:
    assert joined_numbers(f"12{space}345{space}678") == "12345678"
    assert graded("math", f"\\boxed{{12{space}345}}", "12345") == 1.0


MINUS, EN_DASH, WIDE = "\u2212", "\u2013", "\uff0d"


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        *((f"it is {MINUS}5", "-5"), (f"{MINUS}$5", "-5"), (f"x = {EN_DASH}5", "-5"), (f"{WIDE}.5", "-0.5")),
        *((f"1e{MINUS}2", "0.01"), ("-5", f"{MINUS}5"), (f"<answer>{EN_DASH}5</answer>", "-5")),
        *((f"A{EN_DASH}5", "5"), (f"the dash {EN_DASH} 5", "5")),
    ],
)
def test_a_minus_of_unicode_is_one_and_the_dash_of_a_range_is_not(text: str, truth: str) -> None:
    assert [graded("number", text, each) for each in (truth, truth.translate({45: None, 0x2212: None}))] == [
        1.0,
        float(truth[0] not in f"-{MINUS}"),
    ]


@pytest.mark.parametrize("text", ["3–5", "3 – 5", "3 –5", "3−5", "3%–5%", "3-5", "3 to 5"])
@pytest.mark.parametrize("truth", ["3", "5", "-5"])
def test_a_range_or_difference_is_no_one_number(text: str, truth: str) -> None:
    assert graded("number", text, truth) == 0.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("The answer is (C).", 1.0), ("Answer: C", 1.0), ("**Answer:** C", 1.0), ("\\boxed{\\text{C}}", 1.0)),
        *(("A is wrong.\nC", 1.0), ("I choose (A), no, (C)", 1.0), ("<answer>C</answer>", 1.0), ("(C)", 1.0)),
        *(("The answer is A.\nThe answer is C", 1.0), ("Answer: Cat", 0.0), ("A cat", 0.0), ("", 0.0), ("D", 0.0)),
    ],
)
def test_choice_takes_the_letter_that_is_chosen_last(text: str, value: float) -> None:
    assert graded("choice", text, "C") == value


@pytest.mark.parametrize("text", ["9" * 200_000, "1 " * 100_000, "1 000" * 50_000, "1" + " " * 200_000 + "x"])
def test_endless_digits_are_read_once(text: str) -> None:
    """Backwards again and again it takes minutes."""
    before_s = time.process_time()
    joined_numbers(plain_numbers(text))
    assert time.process_time() - before_s < 5


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        *(("The answer I get is (C).", "C"), ("Answer: B) Because choice I made", "B"), ("The answer is I", "I")),
        *(("So the best choice I see is **(B)**", "B"), ("Answer: (I)", "I"), ("Answer: B, an option I'd take", "B")),
        *(("(B) is it. Answer: I think so.", "B"), ("The answer is I because it fits.", "I"), ("\\boxed{I}", "I")),
        *(("Option I is right, (B) is not", "I"), ("**Answer: I** as (B) is wrong", "I"), ("Answer: I\nso (B)", "I")),
    ],
)
def test_i_who_speaks_is_no_option(text: str, letter: str) -> None:
    assert [graded("choice", text, each) for each in "BCI"] == [float(each == letter) for each in "BCI"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a\nb</think>\n<answer>c</answer>", 1.0),
        (" <think></think><answer></answer>\n", 1.0),
        ("<think>a</think>c", 0.0),
        ("<think>a<think>b</think></think><answer>c</answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("well <think>a</think><answer>c</answer>", 0.0),
        ("<answer>c</answer>", 0.0),
        ("<think>a</think><answer>b</answer> junk </answer>", 0.0),
        ("<think>a</think> junk </think><answer>b</answer>", 0.0),
        ("<think>a<answer>b</answer></think><answer>c</answer>", 0.0),
        ("<think>a</think><answer>b<think></answer>", 0.0),
        ("<think>a < b > c</think><answer><b>d</b></answer>", 1.0),
    ],
)
def test_format_wants_both_tags_once(text: str, value: float) -> None:
    assert graded("format", text) == value


def test_regex_length_and_exact() -> None:
    assert [graded("regex", text, pattern=r"\d+ cm") for text in ("it is 12 cm", "cm")] == [1.0, 0.0]
    assert [graded("regex", text, "ye[sp]") for text in ("yep", "no")] == [1.0, 0.0]
    assert [graded("length", "x" * size, target=100) for size in (0, 100, 150, 200, 900)] == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert [graded("exact", text, "a b\n") for text in (" a b", "a  b")] == [1.0, 0.0]
    assert [graded("exact", text, '["a b", "c"]') for text in (" a b", "c", "a")] == [1.0, 1.0, 0.0]
    assert [graded("regex", text, '["^a", "[cd]$"]') for text in ("ab", "bd", "ba")] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("name", ["math", "number", "exact", "choice", "regex", "code"])
def test_without_a_truth_there_is_nothing_to_compare_with(name: str) -> None:
    with pytest.raises(ValueError, match=r"^the row has no truth to compare with: set task\.truth to its field$"):
        graded(name, "1", " ")


@pytest.mark.parametrize(
    ("name", "truth", "message"),
    [
        ("number", "many", "the truth `many` has no number"),
        ("choice", "K", "the truth `K` is not a letter from A to J"),
        ("code", "[]", "the truth `[]` has no tests: it is JSON such as "),
        (
            "code",
            '{"inputs": ["1"], "outputs": []}',
            "`inputs` has 1 entry and `outputs` 0: each test needs one of both",
        ),
        (
            "code",
            '[{"input": 1, "output": 2}]',
            "`input` is `1`, which is not text, and no `fn_name` says that the tests are calls",
        ),
        ("code", '{"inputs": "12", "outputs": "34"}', '`inputs` is `"12"`, but must be a list'),
        ("code", '{"inputs": ["1"], "outputs": "3"}', '`outputs` is `"3"`, but must be a list'),
        ("code", '{"inputs": {"1": 2}, "outputs": ["3"]}', '`inputs` is `{"1": 2}`, but must be a list'),
    ],
)
def test_a_truth_of_another_kind_is_named(name: str, truth: str, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        graded(name, "1", truth)
    assert str(raised.value).startswith(message)


# judge


class Api(BaseHTTPRequestHandler):
    """Says what the test wants, and keeps what it was asked."""

    says: object = "0.5"
    status = 200
    pause_s = 0.0
    requests: ClassVar[list[tuple[str, str, dict]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append((self.path, self.headers.get("Authorization", ""), body))
        self.send_response(self.status)
        self.end_headers()
        said = json.dumps({"choices": [{"message": {"content": self.says}}]}).encode()
        with contextlib.suppress(OSError):  # who asked has gone
            for each in [said[at : at + 1] for at in range(len(said))] if self.pause_s else [said]:
                self.wfile.write(each)
                time.sleep(self.pause_s)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Api.requests.clear()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_judge_asks_an_api_with_its_key_and_reads_a_number(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPLIANCE_JUDGE_KEY", "sesame")
    monkeypatch.setattr(Api, "says", "Hm, 7 of 10 points. So:\n\n**0.7**\n")
    prompt = "{prompt} {response} {truth} {other}"
    value = graded("judge", "{truth}!", "2", url=api, model="m", prompt=prompt)
    assert value == 0.7
    message = {"role": "user", "content": "1+1? {truth}! 2 {other}"}
    body = {"model": "m", "messages": [message], "temperature": 0}
    assert Api.requests == [("/v1/chat/completions", "Bearer sesame", body)]


@pytest.mark.parametrize(
    ("says", "value"),
    [("1", 1.0), ("0", 0.0), (" 0.25\n", 0.25), (".5", 0.5), ("1.0", 1.0), ("0.5 at most\n```\n0.3\n```", 0.3)],
)
def test_judge_reads_numbers_from_0_to_1(api: str, monkeypatch: pytest.MonkeyPatch, says: str, value: float) -> None:
    monkeypatch.setattr(Api, "says", says)
    assert graded("judge", "2", "2", url=api, model="m") == value


AMBIGUOUS = (
    *("-1", "- 1", "0.3/1", "0.2 on a scale from 0 to 1", "0,5", "1,000", "0.5.1", "1.01", "1e-1", "50%", "0.7 or 0.8"),
    *("Score: 0.25.", "0.5\nof 1", "> 0.5", "\u0661", "1 0", "***", "nan"),
)


@pytest.mark.parametrize("says", ["good", "10", "7", "1.5", None, ["1"], "", *AMBIGUOUS])
def test_a_judge_that_says_no_number_is_a_fault(api: str, monkeypatch: pytest.MonkeyPatch, says: object) -> None:
    monkeypatch.setattr(Api, "says", says)
    with pytest.raises(ValueError, match=rf"^{api} gave no number from 0 to 1 as its last line$"):
        graded("judge", "2", url=api, model="m")


def test_a_judge_that_refuses_says_so_without_the_key(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Api, "status", 401)
    monkeypatch.setenv("APPLIANCE_JUDGE_KEY", "sesame")
    with pytest.raises(ValueError, match=rf"^{api} answered 401$"):
        graded("judge", "2", url=api, model="m")
    monkeypatch.setattr(Api, "status", 308)
    with pytest.raises(ValueError, match=rf"^{api} answered 308$"):
        graded("judge", "2", url=api, model="m")
    monkeypatch.setattr(Api, "status", 401)
    monkeypatch.delenv("APPLIANCE_JUDGE_KEY")
    with pytest.raises(ValueError, match=rf"^{api} answered 401, and APPLIANCE_JUDGE_KEY is not set$"):
        graded("judge", "2", url=api, model="m")


def test_a_judge_has_its_time_for_the_whole_answer(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a byte each 0.1 s no read is too long."""
    monkeypatch.setattr(Api, "pause_s", 0.1)
    monkeypatch.setattr(rewards, "JUDGE_S", 0.5)
    with pytest.raises(ValueError, match=rf"^{api} gave no whole answer within 0\.5 s$"):
        graded("judge", "2", url=api, model="m")


@pytest.mark.parametrize("key", ["sesame\nX-Other: 1", "sesame\r\nopen", "open sesame", "s\u00e9same", "ses\tame"])
def test_a_key_that_no_header_carries_is_refused_without_quoting_it(
    api: str, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("APPLIANCE_JUDGE_KEY", key)
    with pytest.raises(ValueError) as raised:
        graded("judge", "2", url=api, model="m")
    why = "APPLIANCE_JUDGE_KEY holds no key: one has no spaces, line breaks or letters beyond ASCII"
    assert (str(raised.value), Api.requests) == (why, [])


def test_each_says_what_it_does_and_gives_a_number_to_anything() -> None:
    with_options = {"length": make_reward("length", target=9)}
    for name, built_in in BUILT_IN.items():
        assert built_in.grade.__doc__, name
        if name in ("judge", "code"):
            continue
        task = make_own_task(with_options.get(name, make_reward(name)))
        (reward,) = load_rewards(task, files=make_files(), parts_of_row=lambda row: ("", None))
        for text in ("", "\0", "\\boxed{" * 50, "####" * 50, "<answer>" * 50, "9" * 400, "(" * 300, "A" * 5000):
            value = reward.value(Response(text, "C" if name == "choice" else "7"))
            assert isinstance(value, float) and numbers.isfinite(value), (name, text)

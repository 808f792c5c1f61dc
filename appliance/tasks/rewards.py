"""The rewards of a task of the user's own, built in by name or in the user's files: only for processes that grade.

Each built-in one is a function of the response, and of the recipe's options for it. None imports anything heavy before
its first response.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from appliance.record.code import user_folder
from appliance.record.plan import OwnPlan, RewardPlan
from appliance.tasks.answers import truth_alternatives
from appliance.tasks.built_in.dapo_math import PARSING_S, braced, import_verifier, is_same, joined_numbers
from appliance.tasks.built_in.gsm8k import FINAL, plain_numbers
from appliance.tasks.code import CODE_S, code
from appliance.tasks.code_tests import read_tests
from appliance.tasks.task import NO_TRUTH, Response, Reward
from appliance.tasks.user_code import Given, load_function
from appliance.terms.environment import JUDGE_KEY_VARIABLE

JUDGE_S = 25.0  # for its answer, less than a response has by default
_TAIL = 1000  # characters that are searched where an answer is not marked
JUDGE_PROMPT = (
    "Question:\n{prompt}\n\nReference answer:\n{truth}\n\nAnswer to grade:\n{response}\n\n"
    "How right is the answer to grade? Reply with one number from 0 to 1, such as 0.25, and nothing else."
)


@dataclass(frozen=True)
class BuiltIn:
    """A reward that a recipe names."""

    grade: Callable[..., object]
    """(response, **options)"""
    options: tuple[str, ...] = ()
    """Keys of the recipe that are its own."""
    needs: tuple[str, ...] = ()
    """Those that must be given."""
    reads: Callable[[str], object] | None = None
    """The truth, and raises ValueError where that is none for it; None: it needs none."""
    reads_json: bool = False
    """Its truth may be any JSON; else it is an answer: text, a number, or a list of them of which each is right."""
    may_read_truth: bool = True
    """As of `Reward`."""
    remedy: str = ""
    """As of `Reward`."""
    most_s: float = 0.0
    """Its own limit for one response, where it has one."""
    prepare: Callable[[], object] = lambda: None
    """Import now what it will need."""


def load_rewards(plan: OwnPlan, *, given: Given) -> tuple[Reward, ...]:
    """Runs the user's files. Raises what they raise, and UserCodeError for a function that is none of the forms."""
    return tuple(_reward(each, plan=plan, given=given) for each in plan.rewards)


def _reward(reward: RewardPlan, *, plan: OwnPlan, given: Given) -> Reward:
    if reward.file:
        sha256, beside = plan.sha256_of(reward.file), user_folder(reward.file, own=plan)
        value = load_function(reward.file, reward.function, given=given, sha256=sha256, beside=beside)
        return Reward(reward.name, reward.weight, value, place=f"{reward.file}:{reward.function}")
    built_in, options = BUILT_IN[reward.function], dict(reward.options)
    built_in.prepare()
    more = {"given": given} if built_in.grade is judge else {}
    value = functools.partial(built_in.grade, **options, **more)
    may_read_truth = built_in.may_read_truth and (reward.function != "regex" or "pattern" in options)
    return Reward(reward.name, reward.weight, value, may_read_truth=may_read_truth, remedy=built_in.remedy)


def unread(truth: str, *, rewards: Iterable[RewardPlan]) -> str:
    """What is wrong with a truth for the first built-in reward that cannot read it, to follow its field's name; else
    empty."""
    for reward, reads in readers(rewards):
        texts = (truth,) if BUILT_IN[reward.function].reads_json else truth_alternatives(truth)
        try:
            for text in texts:
                reads(text)
        except ValueError as error:
            return f": {error}" if truth.strip() else f" is empty, and the reward `{reward.name}` reads it"
    return ""


def answer_reader(rewards: Iterable[RewardPlan]) -> str:
    """The name of the first built-in reward that compares with the truth as an answer; empty where there is none."""
    return next((reward.name for reward, _ in readers(rewards) if not BUILT_IN[reward.function].reads_json), "")


def readers(rewards: Iterable[RewardPlan]) -> Iterator[tuple[RewardPlan, Callable[[str], object]]]:
    """The built-in ones that need a truth, each with what reads it."""
    for reward in rewards:
        if not reward.file and "pattern" not in reward.options and (reads := BUILT_IN[reward.function].reads):
            yield reward, reads


def _given(truth: str) -> str:
    """Raises ValueError where the row has none."""
    if not truth.strip():
        raise ValueError(NO_TRUTH)
    return truth


def exact(response: Response) -> float:
    """1.0 when the response is the truth, or one of several, white space around either ignored."""
    return float(response.written.strip() in [text.strip() for text in truth_alternatives(_given(response.truth))])


_NUMBER = re.compile(r"(?<![\w.])-?\$?(?:(?:\d+(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?")


def _numbers(text: str) -> list[Decimal]:
    found = _NUMBER.findall(joined_numbers(plain_numbers(text)))
    return [_decimal(each.replace(",", "").replace("$", "")) for each in found]


def _decimal(text: str) -> Decimal:
    """Of an exponent beyond 18 digits NaN, which equals nothing."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return Decimal("NaN")


def number(response: Response) -> float:
    """1.0 when the last number of the response is the last one of the truth, dollar signs and what groups thousands
    ignored."""
    wanted = _numbers(_given(response.truth))
    if not wanted:
        raise ValueError(f"the truth `{response.truth[:60]}` has no number")
    return float(_numbers(response.text)[-1:] == wanted[-1:])


_TAGS = re.compile(r"(?is)<answer>(.*?)</answer>")
_ANSWER = re.compile(r"(?i)\banswer[ \t]*:[ \t]*([^\n]+)")
_LINE = re.compile(r"####[ \t]*([^\n]*\S)")
_MORE_MATHS = re.compile(r"[\d^*=+\\]|(?<![A-Za-z]{2})/(?!\s*[A-Za-z]{3,}\W*$)")  # no unit: miles/hour, $5/hour
_CLOSING = re.compile(r"(?i)(?=</answer>)")


def marked_answer(text: str) -> str | None:
    """What the last mark of an answer says: `#### x`, `\\boxed{x}`, `Answer: x` or `<answer>x</answer>`.

    Of `####` the last one with a number, as in GSM8K, without the unit behind it; without a number the last one.
    A mark within a mark, such as a box in the tags, is read too, eight deep at most: degenerate text nests thousands.
    """
    said = None
    for _ in range(8):
        if (inner := _outermost_answer(text)) is None:
            break
        said = text = inner
    return said


def _outermost_answer(text: str) -> str | None:
    text = _CLOSING.sub("\n", text)  # another mark within the tags ends there
    end = max((each.start() for each in _CLOSING.finditer(text)), default=0) + len("</answer>")
    marks = (*_TAGS.finditer(text, 0, end), *_ANSWER.finditer(text))  # each tag behind `end` would read to the text's
    found = [(each.start(), each[1]) for each in marks]
    if (start := text.rfind("\\boxed{")) >= 0 and (inner := braced(text[start + len("\\boxed{") :])) is not None:
        found.append((start, inner))
    numbers, lines = list(FINAL.finditer(text)), list(_LINE.finditer(text))
    if numbers:
        rest = text[numbers[-1].end() :].partition("\n")[0]
        line = numbers[-1][1] + rest if _MORE_MATHS.search(rest) else numbers[-1][1].replace(",", "").replace("$", "")
        found.append((numbers[-1].start(), line))
    elif lines:
        found.append((lines[-1].start(), lines[-1][1]))
    if not found:
        return None
    return max(found)[1].strip().strip("*").strip()


def math(response: Response) -> float:
    """1.0 when the answer is the truth, as text or by math-verify. The answer is what `marked_answer` says, else the
    whole response, else what math-verify finds at its end. Of a truth that is a solution it is read the same way."""
    from math_verify import parse, verify

    truth, text = plain_numbers(_given(response.truth)), plain_numbers(response.text)
    wanted = marked_answer(truth) or truth.strip()
    answer = marked_answer(text)
    if answer is not None:
        return float(_same_number(answer, wanted) or is_same(answer, truth=wanted))
    if text.strip() == wanted:
        return 1.0
    found = parse(joined_numbers(text[-_TAIL:]), parsing_timeout=PARSING_S)
    gold = parse(f"\\boxed{{{joined_numbers(wanted)}}}", parsing_timeout=PARSING_S)
    return float(bool(found and gold) and verify(gold, found, timeout_seconds=PARSING_S))


def _same_number(one: str, other: str) -> bool:
    values = [_numbers(each) for each in (one, other) if _NUMBER.fullmatch(each)]
    return len(values) == 2 and values[0] == values[1]


_SPEAKER = r"I(?:['\u2019][a-z]|[ \t]+(?!(?:is|was|because|since|as|and|or|for|with|which)\b)[a-z])"
_LETTER = rf"[*(\[{{\s]*(?!{_SPEAKER})([A-J])(?![A-Za-z])"
_CHOSEN = re.compile(
    rf"(?:(?i:answer|choice|option)(?i:\s+is)?[ \t]*:?|\\boxed{{(?:\\text{{)?|<answer>)[ \t\n]*{_LETTER}"
)
_ALONE = re.compile(r"(?m)^[*(\[\s]*([A-J])[*)\].:\s]*$")
_BRACKETED = re.compile(r"\(([A-J])\)")


def choice(response: Response) -> float:
    """1.0 when the letter that is chosen last, A to J, is the truth: after `answer is`, `Answer:`, in a box or the
    answer tags; else alone on a line; else in brackets. The I of who speaks, as in `the answer I get`, is none."""
    wanted = _given(response.truth).strip().strip("().").upper()
    if not re.fullmatch("[A-J]", wanted):
        raise ValueError(f"the truth `{response.truth[:60]}` is not a letter from A to J")
    for pattern in (_CHOSEN, _ALONE, _BRACKETED):
        if found := pattern.findall(response.text):
            return float(found[-1] == wanted)
    return 0.0


def regex(response: Response, *, pattern: str = "") -> float:
    """1.0 when the pattern is found in the response; without one in the recipe the truth is it, or each of several. One
    that takes for ever ends at task.reward_timeout_s, and costs its sample."""
    patterns = (pattern,) if pattern else truth_alternatives(_given(response.truth))
    return float(any(re.search(each, response.text) for each in patterns))


_UNTAGGED = "(?:(?!</?(?:think|answer)>).)*+"
_FORMAT = re.compile(rf"(?s)\s*<think>{_UNTAGGED}</think>\s*<answer>{_UNTAGGED}</answer>\s*")


def format_tags(response: Response) -> float:
    """1.0 when the response is `<think>...</think>` and then `<answer>...</answer>`, each once and nothing else."""
    return float(_FORMAT.fullmatch(response.text) is not None)


def length(response: Response, *, target: int) -> float:
    """1.0 for up to `target` characters, then falling in a line to 0.0 at twice as many."""
    return min(1.0, max(0.0, 2.0 - len(response.written) / target))


_SCORE = re.compile(r"0?\.[0-9]+|0(?:\.[0-9]*)?|1(?:\.0*)?")
_MARKDOWN = "*_` \t"


def judge(response: Response, *, given: Given, url: str, model: str, prompt: str = JUDGE_PROMPT) -> float:
    """What a model says at an OpenAI-compatible API about prompt, response and truth: its last line, without marks of
    markdown, is a number from 0 to 1 and nothing else.

    Raises ValueError where it is not, and what httpx raises: no grade is a fault of the judge, not of the response.
    """
    import asyncio  # neither is loaded before its first response

    import httpx

    asked = given(json.loads(response.row))[0] if response.row else ""
    asked = asked if isinstance(asked, str) else "\n\n".join(each["content"] for each in asked)
    values = {"prompt": asked, "response": response.text, "truth": response.truth}
    text = re.sub(r"\{(prompt|response|truth)\}", lambda found: values[found[1]], prompt)
    headers = {"Authorization": f"Bearer {key}"} if (key := _judge_key()) else {}
    body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0}

    async def ask() -> httpx.Response:
        async with asyncio.timeout(JUDGE_S), httpx.AsyncClient(timeout=None) as client:  # httpx limits each read alone
            return await client.post(f"{url.rstrip('/')}/chat/completions", json=body, headers=headers)

    try:
        answer = asyncio.run(ask())
    except TimeoutError:
        raise ValueError(f"{url} gave no whole answer within {JUDGE_S:g} s") from None
    if not answer.is_success:  # it is not followed to another address: the recipe names the one that may be asked
        without = "" if key else f", and {JUDGE_KEY_VARIABLE} is not set"
        raise ValueError(f"{url} answered {answer.status_code}{without if answer.status_code == 401 else ''}")
    try:
        said = answer.json()["choices"][0]["message"]["content"]
    except (ValueError, TypeError, KeyError, IndexError):
        said = None
    lines = [line.strip().strip(_MARKDOWN) for line in said.splitlines()] if isinstance(said, str) else []
    last = next(filter(None, reversed(lines)), "")
    if not _SCORE.fullmatch(last):
        raise ValueError(f"{url} gave no number from 0 to 1 as its last line")
    return float(last)


def _judge_key() -> str:
    """Empty without one. It goes into one header and nowhere else: httpx would quote a header that cannot be."""
    key = os.environ.get(JUDGE_KEY_VARIABLE, "").strip()
    if not re.fullmatch("[!-~]*", key):
        raise ValueError(f"{JUDGE_KEY_VARIABLE} holds no key: one has no spaces, line breaks or letters beyond ASCII")
    return key


BUILT_IN: dict[str, BuiltIn] = {
    "math": BuiltIn(math, reads=_given, prepare=import_verifier),
    "number": BuiltIn(number, reads=_given),
    "exact": BuiltIn(exact, reads=_given),
    "choice": BuiltIn(choice, reads=_given),
    "regex": BuiltIn(regex, options=("pattern",), reads=_given),
    "format": BuiltIn(format_tags, may_read_truth=False),
    "length": BuiltIn(length, options=("target",), needs=("target",), may_read_truth=False),
    "code": BuiltIn(code, reads=read_tests, reads_json=True, may_read_truth=False, most_s=CODE_S),
    "judge": BuiltIn(
        judge,
        options=("url", "model", "prompt"),
        needs=("url", "model"),
        may_read_truth=False,
        remedy=f"see that the API at its url answers and has its model; {JUDGE_KEY_VARIABLE} holds the key",
        most_s=JUDGE_S,
    ),
}

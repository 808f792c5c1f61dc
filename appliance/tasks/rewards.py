"""The rewards of a task of the user's own, built in by name or in the user's files: only for processes that grade.

Each built-in one is a function of the response, and of the recipe's options for it. None imports anything heavy before
its first response.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from appliance.record.plan import TaskFiles
from appliance.settings import sections
from appliance.tasks import choices, graders
from appliance.tasks.answers import given_alternatives, truth_alternatives, without_special_tokens
from appliance.tasks.code import CODE_S, code
from appliance.tasks.code_tests import read_tests
from appliance.tasks.maths.equality import prepare
from appliance.tasks.task import Response, RewardFunction
from appliance.tasks.user_code import Given, load_function
from appliance.terms.environment import JUDGE_KEY_VARIABLE

JUDGE_S = 25.0  # for its answer, less than a response has by default
JUDGE_PROMPT = (
    "Question:\n{prompt}\n\nReference answer:\n{truth}\n\nAnswer to grade:\n{response}\n\n"
    "How right is the answer to grade? Reply with one number from 0 to 1, such as 0.25, and nothing else."
)


@dataclass(frozen=True)
class BuiltIn:
    """A reward that a recipe names."""

    grade: Callable[..., object]
    """Function that grades: (response, **options)."""
    options: tuple[str, ...] = ()
    """Keys of the recipe that are options of this reward."""
    needs: tuple[str, ...] = ()
    """Options that must be given."""
    reads: Callable[[str], object] | None = None
    """Function that reads the truth, and raises ValueError where this reward cannot use it; None: the reward needs no
    truth."""
    reads_json: bool = False
    """Whether the truth may be any JSON; else it is an answer: text, a number, or a list of answers each of which is
    right."""
    may_read_truth: bool = True
    """Whether the truth as the response is to earn more than an empty one, as in `RewardFunction`."""
    remedy: str = ""
    """Remedy, as in `RewardFunction`."""
    most_s: float = 0.0
    """Limit of the reward's own for one response, seconds; 0 where it has none."""
    prepare: Callable[[], object] = lambda: None
    """Function that imports now what the reward will need."""


def load_rewards(settings: sections.Task, *, files: TaskFiles, parts_of_row: Given) -> tuple[RewardFunction, ...]:
    """Load the rewards of a task, and run the user's files for that. Raises what they raise, and UserCodeError for a
    function that has none of the known forms."""
    return tuple(
        _reward(name, reward, files=files, parts_of_row=parts_of_row) for name, reward in settings.named_rewards.items()
    )


def _reward(name: str, reward: sections.Reward, *, files: TaskFiles, parts_of_row: Given) -> RewardFunction:
    """name: of its metric."""
    if reward.file:
        sha256, beside = files.sha256_of(reward.file), files.folder_of(reward.file)
        value = load_function(reward.file, reward.function, parts_of_row=parts_of_row, sha256=sha256, beside=beside)
        return RewardFunction(name, reward.weight, value, place=reward.name)
    built_in, options = BUILT_IN[reward.function], reward.options
    built_in.prepare()
    more = {"parts_of_row": parts_of_row} if built_in.grade is grade_by_judge else {}
    value = functools.partial(built_in.grade, **options, **more)
    return RewardFunction(name, reward.weight, value, may_read_truth=built_in.may_read_truth, remedy=built_in.remedy)


def describe_unread(truth: str, *, rewards: Mapping[str, sections.Reward]) -> str:
    """Describe what is wrong with a truth for the first built-in reward that cannot read it, in words that follow the
    field's name; else empty. rewards: by the names of their metrics, as of the functions below."""
    for name, reward, reads in truth_readers(rewards):
        texts = (truth,) if BUILT_IN[reward.function].reads_json else truth_alternatives(truth)
        try:
            for text in texts:
                reads(text)
        except ValueError as error:
            return f": {error}" if truth.strip() else f" is empty, and the reward `{name}` reads it"
    return ""


def answer_reader(rewards: Mapping[str, sections.Reward]) -> str:
    """Return the name of the first built-in reward that compares with the truth as an answer; empty where there is
    none."""
    return next((name for name, reward, _ in truth_readers(rewards) if not BUILT_IN[reward.function].reads_json), "")


def truth_readers(
    rewards: Mapping[str, sections.Reward],
) -> Iterator[tuple[str, sections.Reward, Callable[[str], object]]]:
    """Yield the built-in rewards that need a truth, each with its name and the function that reads the truth."""
    for name, reward in rewards.items():
        if not reward.file and reward.pattern is None and (reads := BUILT_IN[reward.function].reads):
            yield name, reward, reads


def _require_truth(truth: str) -> str:
    """Return the truth. Raises ValueError where the row has none."""
    given_alternatives(truth)
    return truth


def exact(response: Response) -> float:
    """Return 1.0 when what the model wrote is the truth or one of its alternatives, white space around either
    ignored."""
    accepted = {truth.strip() for truth in given_alternatives(response.truth)}
    written = response.written.strip()
    return float(written in accepted or without_special_tokens(written).strip() in accepted)


def regex(response: Response, *, pattern: str = "") -> float:
    """Return 1.0 when the pattern is found in the response; without a pattern in the recipe it is the truth, or one of
    its alternatives. A pattern that takes for ever ends at task.reward_timeout_s, and its sample counts for nothing."""
    patterns = (pattern,) if pattern else given_alternatives(response.truth)
    return float(any(re.search(alternative, response.text) for alternative in patterns))


_UNTAGGED = "(?:(?!</?(?:think|answer)>).)*"
_FORMAT = re.compile(rf"(?s)\s*<think>{_UNTAGGED}</think>\s*<answer>{_UNTAGGED}</answer>\s*")


def format_tags(response: Response) -> float:
    """Return 1.0 when the response is `<think>...</think>` and then `<answer>...</answer>`, each once and nothing
    else."""
    return float(_FORMAT.fullmatch(response.text) is not None)


def length(response: Response, *, target: int) -> float:
    """Return 1.0 for up to `target` characters, then less in a straight line, down to 0.0 at twice as many."""
    return min(1.0, max(0.0, 2.0 - len(response.written) / target))


_SCORE = re.compile(r"0?\.[0-9]+|0(?:\.[0-9]*)?|1(?:\.0*)?")
_MARKDOWN = "*_` \t"


def grade_by_judge(
    response: Response, *, parts_of_row: Given, url: str, model: str, prompt: str = JUDGE_PROMPT
) -> float:
    """Return the grade that a model at an OpenAI-compatible API gives for prompt, response and truth: its last
    line, without marks of markdown, is a number from 0 to 1 and nothing else.

    Raises ValueError where that line is something else, and what httpx raises: a missing grade is a fault of the judge,
    not of the response.
    """
    import asyncio  # neither is loaded before its first response

    import httpx

    question = parts_of_row(json.loads(response.row))[0] if response.row else ""
    question = question if isinstance(question, str) else "\n\n".join(each["content"] for each in question)
    values = {"prompt": question, "response": response.text, "truth": response.truth}
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
        verdict = answer.json()["choices"][0]["message"]["content"]
    except (ValueError, TypeError, KeyError, IndexError):
        verdict = None
    lines = [line.strip().strip(_MARKDOWN) for line in verdict.splitlines()] if isinstance(verdict, str) else []
    last = next(filter(None, reversed(lines)), "")
    if not _SCORE.fullmatch(last):
        raise ValueError(f"{url} gave no number from 0 to 1 as its last line")
    return float(last)


def _judge_key() -> str:
    """Return the judge's key; empty without one. It goes into one header and nowhere else: httpx would quote a header
    that cannot be."""
    key = os.environ.get(JUDGE_KEY_VARIABLE, "").strip()
    if not re.fullmatch("[!-~]*", key):
        raise ValueError(f"{JUDGE_KEY_VARIABLE} holds no key: one has no spaces, line breaks or letters beyond ASCII")
    return key


BUILT_IN: dict[str, BuiltIn] = {
    "math": BuiltIn(graders.math, reads=_require_truth, prepare=prepare),
    "number": BuiltIn(graders.number, reads=_require_truth, prepare=prepare),
    "exact": BuiltIn(exact, reads=_require_truth),
    "choice": BuiltIn(choices.choice, reads=_require_truth),
    "regex": BuiltIn(regex, options=("pattern",), reads=_require_truth, may_read_truth=False),  # a pattern is no answer
    "format": BuiltIn(format_tags, may_read_truth=False),
    "length": BuiltIn(length, options=("target",), needs=("target",), may_read_truth=False),
    "code": BuiltIn(code, reads=read_tests, reads_json=True, may_read_truth=False, most_s=CODE_S),
    "judge": BuiltIn(
        grade_by_judge,
        options=("url", "model", "prompt"),
        needs=("url", "model"),
        may_read_truth=False,
        remedy=f"see that the API at its url answers and has its model; {JUDGE_KEY_VARIABLE} holds the key",
        most_s=JUDGE_S,
    ),
}

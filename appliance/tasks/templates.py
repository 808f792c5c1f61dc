"""What a model's chat template makes of messages: whether each text is in the prompt, which day it gets, and what the
prompt leaves to the model. A template is a program: it may lose, shorten or change what it is given, and says nothing.

`python -m appliance.tasks.templates`, a RunPlan as JSON on stdin, is the child that preflight asks: it loads a
tokenizer, which takes seconds. Imports no torch.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from appliance.errors import first_line
from appliance.record.plan import RunPlan
from appliance.settings import sections
from appliance.tasks.answers import truth_alternatives
from appliance.tasks.library import is_from_hub, task_of
from appliance.tasks.rewards import BUILT_IN
from appliance.tasks.rows import Message, Problem
from appliance.tasks.tokenizer import load_tokenizer
from appliance.tasks.trial_answers import is_bare
from appliance.tasks.user_code import open_voice
from appliance.terms.clock import clock_of
from appliance.terms.counts import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
END_OF_THINKING = "</think>"
# What a chat template, which is a program, may raise beside jinja's own.
OF_A_PROGRAM = (ArithmeticError, AttributeError, LookupError, MemoryError)
OF_A_PROGRAM += (RuntimeError, SyntaxError, TypeError, ValueError)
TEKKEN = "tekken.json"  # Mistral's own format of a tokenizer
_MISTRALS = "MistralCommonBackend"  # transformers' class for it, taken where the file is there
_ROWS = 100  # of a file, whose conversations are tried
_LONG = 20_000  # characters of a message that is tried: longer than a template would cut
_BEGIN = 40  # characters of a text, by which one that was cut is known
_SHOWN = 40  # characters of what the model has to write
_HINT_SYSTEM = "a model without system messages needs task.system null, and none in the rows"
_HINT_PARTS = (
    "the template reads messages in parts, and those of a task are text: write {{ message.content }} in it, in a "
    "chat_template.jinja in the model's folder"
)
_HINT = "mend it in a chat_template.jinja in the model's folder, which comes before the tokenizer's own"


@dataclass(frozen=True)
class TemplateFacts:
    """Facts about a model's chat template and tokenizer, as the child reports them to preflight."""

    problem: str = ""
    """Reason why the template cannot be used, or empty."""
    remedy: str = ""
    """Remedy for the problem."""
    begin_of_answer: str = ""
    """Text that the model has to write before its answer, because the template has no generation prompt; or empty."""
    tokens: int = 0
    """Size of the tokenizer's vocabulary; 0 where it could not be loaded."""
    unproven: str = ""
    """Reason why it is not known whether the template can be used, or empty."""
    long_truths: str = ""
    """Sentence about right answers that have more tokens than a response may have, or empty."""
    long_prompts: str = ""
    """Sentence about most prompts being longer than a prompt may be, or empty."""

    @property
    def no_generation_prompt(self) -> str:
        """Sentence about `begin_of_answer`."""
        line = self.begin_of_answer.replace("\n", "\\n")
        begin = line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
        return (
            "the chat template has no generation prompt: it renders the same with and without add_generation_prompt, "
            f"so the model has to write `{begin}` itself before it answers"
        )


def missing_template(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str] | None:
    """Return (why the tokenizer has no chat template, remedy); None where it has one."""
    if tokenizer.chat_template:
        return None
    if type(tokenizer).__name__ == _MISTRALS:
        problem = (
            f"{TEKKEN}: transformers reads it by mistral-common, which puts prompts together in code of its own and "
            "takes no chat template: what the model gets cannot be checked"
        )
        return problem, f"use a copy of the folder without {TEKKEN}, which has tokenizer.json and a chat template"
    problem = "the model has no chat template: its tokenizer does not say how a prompt is put to it"
    return problem, "take an instruct model, or add a chat_template.jinja to the model's folder"


def text_problem(messages: Sequence[Message], rendering: str) -> str:
    """Name the message that a rendering does not have whole and in its place, or an empty text.

    Spaces around a text may go. A system message may be anywhere: some templates put it before the last user's. Of
    an earlier answer its thinking may be left out, which Qwen3 and DeepSeek-R1 are made for.
    """
    end = 0
    for number, (role, content) in enumerate(messages, start=1):
        text = content.strip()
        begin = rendering.find(text, 0 if role == SYSTEM else end)
        if begin < 0 and role == ASSISTANT and END_OF_THINKING in text:
            text = text.rpartition(END_OF_THINKING)[2].strip()
            begin = rendering.find(text, end)
        if begin < 0:
            is_only_one = sum(other == role for other, _ in messages) == 1
            which = f"the {role} message" if is_only_one else f"message {number} of {len(messages)} ({role})"
            return f"it {_how_lost(text, rendering)} {which}"
        if role != SYSTEM:
            end = begin + len(text)
    return ""


def _how_lost(text: str, rendering: str) -> str:
    if text in rendering:
        return "puts in another place"
    if text.lower() in rendering.lower():
        return "changes the case of"
    if "".join(text.split()) in "".join(rendering.split()):
        return "changes the spaces in"
    return "does not have all of" if text[: max(1, min(_BEGIN, len(text) // 2))] in rendering else "leaves out"


def refusal(error: BaseException | None, why: str, *, roles: Sequence[str]) -> tuple[str, str]:
    """Return (reason, remedy) for a template that raised, or that loses a text. roles: of the messages."""
    reason = first_line(error) if error is not None else why
    is_of_system = SYSTEM in roles and ("system" in reason.lower() or error is not None)
    return reason, _HINT_SYSTEM if is_of_system else _HINT


def conversation(roles: Sequence[str]) -> list[Message]:
    """Make messages of these roles, whose texts are in no template: long, of several lines, with capitals, spaces and
    what is special in HTML, JSON and jinja."""
    word = "Zq7 wÄrt  \"x\" & <b>y</b> 'z' {{ 3 }}\n\tEnd-of-line 東京 {% if %} \\n "
    return [
        (role, f"Begin{number} {(word * (_LONG // len(word) + 1))[:_LONG]} End{number}")
        for number, role in enumerate(roles)
    ]


def examine(tokenizer: PreTrainedTokenizerBase, *, conversations: Sequence[Sequence[str]], date: str) -> TemplateFacts:
    """Examine a chat template. conversations: the roles of the messages, for each kind of conversation that the task
    has."""
    import jinja2

    clock, tokens = clock_of(tokenizer, date=date), len(tokenizer)

    def render(messages: Sequence[Message], *, prompts: bool = True, in_parts: bool = False) -> str:
        made = [{"role": role, "content": _parts(text) if in_parts else text} for role, text in messages]
        return tokenizer.apply_chat_template(made, tokenize=False, add_generation_prompt=prompts, **clock)

    begin_of_answer = ""
    for roles in conversations:
        messages = conversation(roles)
        raised: BaseException | None = None
        try:
            rendering = render(messages)
            why = text_problem(messages, rendering)
            if not why and render(messages) != rendering:
                why = "it makes another prompt of the same messages each time"
        except (jinja2.TemplateError, *OF_A_PROGRAM) as error:
            raised, why = error, first_line(error)
        if why:
            reason, remedy = refusal(raised, why, roles=roles)
            if raised is None and _takes_parts(messages, render=render):
                remedy = _HINT_PARTS
            problem = f"the model's chat template does not take messages of {', '.join(roles)}: {reason}"
            return TemplateFacts(problem, remedy, tokens=tokens)
        begin_of_answer = begin_of_answer or _begin_of_answer(messages, render=render)
    return TemplateFacts(begin_of_answer=begin_of_answer, tokens=tokens)


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _takes_parts(messages: Sequence[Message], *, render: Callable[..., str]) -> bool:
    import jinja2

    try:
        return not text_problem(messages, render(messages, in_parts=True))
    except (jinja2.TemplateError, *OF_A_PROGRAM):
        return False


def _begin_of_answer(messages: Sequence[Message], *, render: Callable[..., str]) -> str:
    """Say what the template puts between a prompt and the answer to it, where it puts nothing at the end of a prompt
    that is to be answered. Nothing of a template that begins the answer right behind the prompt: Mistral's."""
    import jinja2

    prompt, answer = render(messages), "Answer17"
    try:
        if prompt != render(messages, prompts=False):
            return ""
        before = render([*messages, (ASSISTANT, answer)], prompts=False).partition(answer)[0]
    except (jinja2.TemplateError, *OF_A_PROGRAM):
        return ""
    return before[len(prompt) :].strip() if before.startswith(prompt) else ""


def conversations_of(plan: RunPlan) -> list[tuple[str, ...]]:
    """Return the roles of the messages of each kind of conversation in the first rows; for data that is not here the
    roles that a prompt has at least."""
    usual = (SYSTEM, USER) if plan.task.system else (USER,)
    kinds = (tuple(role for role, _ in problem.messages) for problem in _first_problems(plan))
    return list(dict.fromkeys(kinds)) or [usual]


def _first_problems(plan: RunPlan) -> list[Problem]:
    """Read the first rows of each file, or the task's own first problems; none of data that is not here."""
    settings, task = plan.task, task_of(plan.task, files=plan.task_files)
    files = settings.data_files if task.source is not None else ()
    if not files and not is_from_hub(settings):
        files = ("",)
    read = functools.partial(task.first_problems, _ROWS, difficulty=settings.difficulty, seed=settings.seed)
    return [problem for file in files for problem in read(file=file)]


def long_truths(plan: RunPlan, *, tokenizer: PreTrainedTokenizerBase) -> str:
    """Say how many of the first rows have a right answer that is longer than a response may be; empty where none has.

    It counts for rewards of ours that compare a response with the truth: what else earns something, a function of the
    user's knows. Only `exact` asks for all of a truth that is a solution; of others nobody knows what their answer is.
    """
    weighty = [reward for reward in plan.task.rewards if reward.weight]
    if plan.task.is_own and not any(_wants_the_truth(reward) for reward in weighty):
        return ""
    is_exact = any(reward.name == "exact" for reward in weighty)
    problems, most = _first_problems(plan), plan.task.max_response_tokens
    lengths = {
        truth: min(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in truth_alternatives(truth))
        for truth in {problem.truth for problem in problems}
        if is_exact or is_bare(truth)
    }
    too_long = [problem.truth for problem in problems if lengths.get(problem.truth, 0) > most]
    if not too_long:
        return ""
    rows = f"in {len(too_long)} of the first {counted(len(problems), 'problem')}"
    have = f"the right answer has more tokens than a response may have, {most}"
    return f"{rows} {have}: `{too_long[0][:_SHOWN]}` has {lengths[too_long[0]]}"


def long_prompts(plan: RunPlan, *, tokenizer: PreTrainedTokenizerBase) -> str:
    """Say that more than half of the first rows have a prompt that is too long, so that they are left out; empty where
    it is fewer, where long prompts are cut instead, and for a task with tools, whose schemas are a part of a prompt."""
    import jinja2

    task = plan.task
    problems = [] if task.truncates_prompts or task.tools else _first_problems(plan)
    render = functools.partial(
        tokenizer.apply_chat_template,
        add_generation_prompt=True,
        return_dict=True,
        **clock_of(tokenizer, date=plan.task_files.date),
    )
    lengths = []
    for problem in problems:
        messages = [{"role": role, "content": content} for role, content in problem.messages]
        try:
            lengths.append(len(render(messages)["input_ids"]))
        except (jinja2.TemplateError, *OF_A_PROGRAM):
            continue  # the template refuses this row alone: the making of the data names it
    too_long = [length for length in lengths if length > task.max_prompt_tokens]
    if 2 * len(too_long) <= len(lengths):
        return ""
    rows = f"{len(too_long)} of the first {counted(len(lengths), 'problem')}"
    most = f"more than {task.max_prompt_tokens} tokens, the chat template's included, and are left out"
    return f"{rows} have prompts of {most}; the longest has {max(lengths)}"


def _wants_the_truth(reward: sections.Reward) -> bool:
    """Tell whether a right response has the truth in it."""
    if reward.file:
        return False
    built_in = BUILT_IN[reward.function]
    return built_in.reads is not None and built_in.may_read_truth


def main() -> int:
    plan = RunPlan.model_validate_json(sys.stdin.buffer.read())
    if not plan.model.trust_remote_code:
        # transformers takes three seconds more where it finds torch, which none of its tokenizers needs.
        sys.modules["torch"] = None  # type: ignore[assignment]
    say = open_voice()
    say("template", asdict(_facts(plan)))
    os._exit(0)  # a model's own code may have left threads


def _facts(plan: RunPlan) -> TemplateFacts:
    try:
        tokenizer: Any = load_tokenizer(plan)
    except Exception as error:  # the boundary of the tokenizer's files, of whatever form
        reason = f"its tokenizer cannot be loaded: {type(error).__name__}: {first_line(error)}"
        return TemplateFacts(f"{plan.model.given_name}: {reason}", "copy or download the tokenizer's files again")
    if missing := missing_template(tokenizer):
        return TemplateFacts(*missing, tokens=len(tokenizer))
    facts = examine(tokenizer, conversations=conversations_of(plan), date=plan.task_files.date)
    if facts.problem:
        return facts
    about_answers, about_prompts = (count(plan, tokenizer=tokenizer) for count in (long_truths, long_prompts))
    return replace(facts, long_truths=about_answers, long_prompts=about_prompts)


if __name__ == "__main__":
    sys.exit(main())

"""The user's own task: problems from rows as they come, rewards that are built in or functions of the user's.

A row's prompt is text, chat messages (TRL's, verl's) or a template over its fields. Runs no code of the user's: that is
`user_code.py`, in its own process.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.record.plan import TaskFiles
from appliance.settings import sections
from appliance.tasks.rewards import answer_reader, describe_unread, load_rewards
from appliance.tasks.rows import Message, Problem, ProblemSet, Row, RowFault, Source, read_data_set, without_faults
from appliance.tasks.task import DataFile, TaskDefinition
from appliance.tasks.trial_answers import in_marks
from appliance.tasks.truth import answer_text, as_text, form_of, is_nothing

KIND = "own"
VERLS_TRUTH = "reward_model.ground_truth"
_ROLES = ("system", "user", "assistant")
_PATH = re.compile(r"[^{}\[\]!:.\s]+(\.[^{}\[\]!:.\s]+)*")
_MOST_NAMED = 12  # fields of a row, in a message


@dataclass(frozen=True)
class _DataSet(DataFile):
    """A whole data set of the hub, whatever its files are."""

    config: str
    part: str
    """Split of the data set, by its own name."""
    commit: str
    """Commit of the data set; empty: that of `main`."""

    def read(self, source: Source, *, keys: tuple[str, ...] = ()) -> ProblemSet:
        problem_set = read_data_set(self.hub, config=self.config, split=self.part, commit=self.commit, source=source)
        return without_faults(problem_set)[0]


def task(settings: sections.Task, *, files: TaskFiles) -> TaskDefinition:
    name, config = settings.data or "", settings.config or ""
    data_set = _DataSet("own-train", "train", name, "", config, settings.split, files.commit)
    parts_of_row = functools.partial(prompt_and_truth, settings=settings)
    parse = functools.partial(parse_row, settings=settings, rewards=settings.named_rewards)
    return TaskDefinition(
        kind=KIND,
        score=_unused,
        answers=in_marks,
        describe=_describe(settings),
        source=Source(parse=parse, hint=_hint(settings), knows_verl=True),
        load_rewards=functools.partial(load_rewards, settings, files=files, parts_of_row=parts_of_row),
        data_sets={name: (data_set,)},
    )


def parse_row(
    row: Row, *, settings: sections.Task, rewards: Mapping[str, sections.Reward] | None = None
) -> Problem | RowFault:
    """Make the problem of a row, or return what is wrong with it, with the field's name and perhaps a hint. rewards:
    the rewards that read the truth, by name; None: those of the settings."""
    rewards = settings.named_rewards if rewards is None else rewards
    template, field = settings.template, settings.prompt
    messages = _templated(row, template=template) if template else _messages_of(row, field=field)
    if not isinstance(messages, list):
        return messages
    *before, (_, prompt) = messages
    if settings.system:
        if before and before[0][0] == "system":
            return f"the field `{field}` begins with a system message, and task.system gives another"
        before.insert(0, ("system", settings.system))
    path = settings.truth or (VERLS_TRUTH if "reward_model" in row else "")
    if not path:
        return Problem(prompt, "", tuple(before), json.dumps(row), form_of(None))
    try:
        value = field_at(row, path)
    except KeyError:
        return _missing(row, path)
    if is_nothing(value):
        return f"the field `{path}` is {as_text(value)}"
    truth, form = as_text(value), _truth_form(value)
    if reader := answer_reader(rewards):
        try:
            truth, form = answer_text(value), "an answer"  # some rows may have a list of answers and others one
        except ValueError as error:
            return f"the field `{path}` {error}, and the reward `{reader}` reads it", _how_to_answer(value, path=path)
    if why := describe_unread(truth, rewards=rewards):
        return f"the field `{path}`{why}"
    return Problem(prompt, truth, tuple(before), json.dumps(row), form)


def prompt_and_truth(row: Row, *, settings: sections.Task) -> tuple[str | list[dict[str, str]], object]:
    """Return (prompt, truth) for the reward functions of other trainers: the prompt as text, or as all the messages
    that the model reads where the row has chat messages; the truth as the row has it, None where it has none. row: that
    of a problem."""
    problem = parse_row(row, settings=settings, rewards={})  # which have looked at its truth
    assert isinstance(problem, Problem), "a row that became a problem"
    path = settings.truth or (VERLS_TRUTH if "reward_model" in row else "")
    truth = field_at(row, path) if path else None
    if settings.template or isinstance(field_at(row, settings.prompt), str):
        return problem.prompt, truth
    return [{"role": role, "content": content} for role, content in problem.messages], truth


def field_at(row: Row, path: str) -> Any:
    """Return the value at a dotted path; a field whose own name has dots in it comes first. Raises KeyError."""
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            raise KeyError(path)
        value = value[name]
    return value


def template_parts(template: str) -> list[tuple[str, str]]:
    """Split a template into (text, path of the field after it or empty), as `str.format` reads braces, but without
    attributes and formats. Raises ValueError that names what is wrong."""
    parts = []
    for text, name, form, conversion in string.Formatter().parse(template):
        if name is not None and (form or conversion or not _PATH.fullmatch(name)):
            given = f"{name}{f'!{conversion}' if conversion else ''}{f':{form}' if form else ''}"
            raise ValueError(f"`{{{given}}}` names no field")
        parts.append((text, name or ""))
    return parts


def _messages_of(row: Row, *, field: str) -> list[Message] | RowFault:
    """Return the messages up to the answer, the last of which is the user's; or what is wrong with the row."""
    try:
        value = field_at(row, field)
    except KeyError:
        return _missing(row, field)
    if isinstance(value, str):
        return [("user", value)] if value.strip() else f"the field `{field}` is empty"
    if not isinstance(value, list):
        return f"the field `{field}` is {form_of(value)}, neither text nor a list of chat messages"
    if not value:
        return f"the field `{field}` has no messages"
    messages = []
    for number, message in enumerate(value, start=1):
        where = f"message {number} of the field `{field}`"
        if not isinstance(message, dict):
            return f"{where} is {form_of(message)}, not an object with `role` and `content`"
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            what = "has no `role`" if role is None else f"has the role {as_text(role)[:40]}"
            return f"{where} {what}, and a prompt is made of {', '.join(_ROLES)}"
        if not isinstance(content, str):
            return f"{where} has no text as `content`"
        messages.append((role, content))
    if messages[-1][0] != "user":
        return f"the last message of the field `{field}` is not the user's"
    return messages if messages[-1][1].strip() else f"the last message of the field `{field}` is empty"


def _templated(row: Row, *, template: str) -> list[Message] | RowFault:
    texts = []
    for text, name in template_parts(template):
        texts.append(text)
        if name:
            try:
                value = field_at(row, name)
            except KeyError:
                return _missing(row, name, place=" of task.template")
            if is_nothing(value):
                return f"the field `{name}` of task.template is {as_text(value)}"
            texts.append(as_text(value))
    prompt = "".join(texts)
    return [("user", prompt)] if prompt.strip() else "task.template makes an empty prompt of this row"


def _missing(row: Row, path: str, *, place: str = "") -> RowFault:
    names = [f"`{name[:40]}`" for name in row]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    has = f"the row has {', '.join(names[:_MOST_NAMED])}{more}" if names else "the row is empty"
    message = f"the field `{path}`{place} is missing: {has}"
    near = _nearest(path, tuple(row))
    return (message, f"did you mean `{near}`?") if near else message


@functools.lru_cache(maxsize=64)  # a data set may have a million such rows
def _nearest(name: str, names: tuple[str, ...]) -> str:
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.75)), "")


def _truth_form(value: object) -> str:
    """Name the form of a truth. 132 and "132" are the same truth, and some rows may have a list and others one answer,
    so these forms have one name."""
    form = form_of(value)
    return "text, a number or a list" if form in ("text", "a number", "a list") else form


def _how_to_answer(value: object, *, path: str) -> str:
    """Say how to make an answer of a truth that is none. path: the truth's field."""
    otherwise = "judge it with functions of your own alone"
    if isinstance(value, bool):
        return f'write it as text, such as "{value}", or {otherwise}'
    if isinstance(value, dict) and (inner := _answer_in(value)):
        return f"name an inner field, such as `{path}.{inner}`, or {otherwise}"
    if isinstance(value, list):
        return f"a list has right answers, each of them text or a number: correct it, or {otherwise}"
    return f"name a field that has the answer, or {otherwise}"


def _answer_in(value: dict[str, Any]) -> str:
    """Return the path of the first answer in an object, before those in the objects in it; empty where there is
    none."""
    inner = {name: member for name, member in value.items() if "." not in name}
    for name, member in inner.items():
        if form_of(member) in ("text", "a number") and not is_nothing(member):
            return name
    for name, member in inner.items():
        if isinstance(member, dict) and (path := _answer_in(member)):
            return f"{name}.{path}"
    return ""


def _hint(settings: sections.Task) -> str:
    wanted = "the fields of task.template" if settings.template else f"`{settings.prompt}`, text or chat messages"
    return f"each row is a JSON object with {wanted}" + (f", and `{settings.truth}`" if settings.truth else "")


def _describe(settings: sections.Task) -> str:
    template = settings.template
    asked = f"a template of {len(template)} characters" if template else f"the field `{settings.prompt}`"
    judged = " + ".join(f"{reward.weight:g} x {name}" for name, reward in settings.named_rewards.items())
    return f"{asked}, judged by {judged}"


def _unused(*, response: str, truth: str) -> float:
    raise AssertionError("the rewards of a task of the user's own are loaded")

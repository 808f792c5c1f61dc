"""The user's own task: problems from rows as they come, rewards that are built in or functions of the user's.

A row's prompt is text, chat messages (TRL's, verl's) or a template over its fields. Runs no code of the user's: that is
`user_code.py`, in a process of its own.
"""

from __future__ import annotations

import functools
import json
import string
from typing import Any

from appliance.record.plan import OwnPlan
from appliance.tasks.rewards import load_rewards
from appliance.tasks.rows import Message, Problem, Row, Source
from appliance.tasks.task import Task

KIND = "own"
VERLS_TRUTH = "reward_model.ground_truth"
_ROLES = ("system", "user", "assistant")


def task(plan: OwnPlan) -> Task:
    return Task(
        kind=KIND,
        score=_unused,
        answers=_answers,
        source=Source(parse=functools.partial(parse_row, plan=plan), hint=_hint(plan), knows_verl=True),
        load_rewards=functools.partial(load_rewards, plan, given=functools.partial(as_given, plan=plan)),
    )


def parse_row(row: Row, *, plan: OwnPlan) -> Problem | str:
    """The problem of a row, or what is wrong with it, with the field's name."""
    said = _templated(row, template=plan.template) if plan.template else _said(row, field=plan.prompt)
    if isinstance(said, str):
        return said
    *before, (role, prompt) = said
    if role != "user":
        return f"the last message of `{plan.prompt}` is not the user's"
    if plan.system:
        before.insert(0, ("system", plan.system))
    truth: Any = None
    path = plan.truth or (VERLS_TRUTH if "reward_model" in row else "")
    if path:
        try:
            truth = field_at(row, path)
        except KeyError:
            return f"the field `{path}` is missing"
    text = truth if isinstance(truth, str) else json.dumps(truth, default=str, ensure_ascii=False)
    kept = json.dumps(row, default=str, ensure_ascii=False)
    return Problem(prompt, "" if truth is None else text, tuple(before), kept)


def as_given(row: Row, *, plan: OwnPlan) -> tuple[str | list[dict[str, str]], object]:
    """(prompt, truth) for the forms of other trainers: the prompt as text, or where the row has chat messages as all
    of them that the model reads; the truth as it stands there, None where there is none.  row: a problem's."""
    made = parse_row(row, plan=plan)
    assert isinstance(made, Problem), "a row that became a problem"
    path = plan.truth or (VERLS_TRUTH if "reward_model" in row else "")
    truth = field_at(row, path) if path else None
    if plan.template or isinstance(field_at(row, plan.prompt), str):
        return made.prompt, truth
    return [{"role": role, "content": content} for role, content in made.messages], truth


def field_at(row: Row, path: str) -> Any:
    """The value at a dotted path. Raises KeyError."""
    value: Any = row
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            raise KeyError(path)
        value = value[name]
    return value


def _said(row: Row, *, field: str) -> list[Message] | str:
    try:
        value = field_at(row, field)
    except KeyError:
        return f"the field `{field}` is missing"
    if isinstance(value, str):
        return [("user", value)] if value.strip() else f"the field `{field}` is empty"
    if not isinstance(value, list) or not value:
        return f"the field `{field}` is neither text nor a list of chat messages"
    said = []
    for message in value:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in _ROLES or not isinstance(content, str):
            return f"the field `{field}` has a message without a `role` of {', '.join(_ROLES)} and a text as `content`"
        said.append((role, content))
    return said


def _templated(row: Row, *, template: str) -> list[Message] | str:
    made = []
    for text, name, _, _ in string.Formatter().parse(template):
        made.append(text)
        if name is not None:
            try:
                made.append(str(field_at(row, name)))
            except KeyError:
                return f"the field `{name}` of task.template is missing"
    return [("user", "".join(made))]


def _hint(plan: OwnPlan) -> str:
    wanted = "the fields of task.template" if plan.template else f"`{plan.prompt}`, text or chat messages"
    return f"each row is a JSON object with {wanted}" + (f" and `{plan.truth}`" if plan.truth else "")


def _answers(truth: str) -> tuple[str, ...]:
    """Forms in which a model may be asked to answer."""
    marked = (f"#### {truth}", f"\\boxed{{{truth}}}", f"Answer: {truth}", f"<answer>{truth}</answer>")
    return (truth, *marked, f"<think>\n\n</think>\n<answer>{truth}</answer>")


def _unused(*, response: str, truth: str) -> float:
    raise AssertionError("the rewards of a task of the user's own are loaded")

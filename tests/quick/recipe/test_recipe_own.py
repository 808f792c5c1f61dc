"""Rules of a task of the user's own: what a recipe says of its data and prompts."""

from __future__ import annotations

import pytest
from test_recipe_rules import problems_of, without_place

OWN = ("task.kind=own", "task.rewards=[{name: exact}]")
BRACES = "write {field} or {field.inner} for a field's value, {{ and }} for braces"
RULES = {
    "no data": (
        (),
        ("task.train_file: a task of your own needs problems", "give task.train_file, or a data set as task.data"),
    ),
    "a file and a data set": (
        ("task.train_file=a.jsonl", "task.data=a/b"),
        ("task.data: `data` and `train_file` exclude each other", "remove one"),
    ),
    "no data set": (
        ("task.data=json",),
        (
            "task.data: `json` is no name of a data set",
            "a data set of the hub is `owner/name`; a file is task.train_file",
        ),
    ),
    "a path": (
        ("task.data=./a/b",),
        (
            "task.data: `./a/b` is no name of a data set",
            "a data set of the hub is `owner/name`; a file is task.train_file",
        ),
    ),
    "a split of nothing": (
        ("task.train_file=a.jsonl", "task.split=test"),
        ("task.split: it is for a data set on the hub, and `data` names none", "remove it, or give task.data"),
    ),
    "a field and a template": (
        ("task.train_file=a.jsonl", "task.prompt=q", "task.template='{q}?'"),
        (
            "task.template: `template` and `prompt` exclude each other",
            "a template names its fields itself: remove one; an inherited `prompt` goes with `prompt: prompt`",
        ),
    ),
    "a box": (
        ("task.train_file=a.jsonl", "task.template='{q} in \\boxed{}'"),
        ("task.template: `{}` names no field", BRACES),
    ),
    "a lone brace": (
        ("task.train_file=a.jsonl", "task.template='{q'"),
        ("task.template: expected '}' before end of string", BRACES),
    ),
    "no field": (
        ("task.train_file=a.jsonl", "task.template=1 + 2?"),
        ("task.template: it names no field, so that all prompts are the same", BRACES),
    ),
    "epochs of an unknown size": (
        ("task.train_file=a.jsonl", "trainer.steps=null", "trainer.epochs=1"),
        ("trainer.epochs: `epochs` needs task.train_size", "give it, or `steps`"),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_rule_of_a_task_of_ones_own(name: str) -> None:
    sets, problem = RULES[name]
    ((message, hint),) = problems_of(*OWN, *sets)
    assert (without_place(message), hint) == problem

"""Each part that the page of a run is promised to have, with its numbers: docs/report.md."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.record.events import append_event
from appliance.record.plan import Choice, read_plan
from appliance.report.folder import read_view
from appliance.report.page import page

FIGURES = {  # a curve's title -> what else must be written in its figure
    "Reward": ("0.4",),
    "Validation": ("int8 |0.9", "bf16 |0.91"),
    "Response": ("tokens, mean",),
    "Unfinished": ("0.25", "cut before the model ended them"),
    "Entropy": ("0.3",),
    "Clipped share": ("0.007", "of the tokens with a negative advantage"),
    "Gradient norm": ("before clipping",),
    "Mismatch, k3": ("1.0e-04", "bound 0.015"),
    "Effective sample size": ("0.99", "bound 0.3"),
    "Importance weights": ("mean |1", "largest |1.2", "mean above 0.5", "mean below 2"),
    "Truncated": ("share of the tokens",),
    "Codes changed": ("0.1",),
    "Saturated codes": ("0.003",),
    "Scale drift": ("0.01",),
    "Quantisation error": ("0.009",),
    "Rollout speed": ("2000", "tokens per second"),
    "Time of a step": ("rollout |0.5", "log-probs |0.5", "update |1", "sync |0.1", "rest |0.3"),
    "What the run was doing": (
        "preparing",
        "loading",
        "training",
        "saving",
        "checkpoints",
        "step 10 is saved (the end)",
    ),
    "Memory": ("2", "GiB, proportional set size"),
}
DETAILS = {  # of what ran: a fold's title -> what is in it
    "Recipe, as resolved": ("name: made  # <&>",),
    "1 number that was derived, with its reason": ("rollout.scheme|int8|this processor has VNNI",),
    "1 finding of preflight": ("memory: 2.0 GiB are missing; close other programs",),
    "2 processes, as they report themselves": ("rollout-0-0|rollout|int8|a|16 × Int8Kernel",),
    "Versions": ("torch|2.13.0|python|3.11.7",),
    "The training process, exactly": ("-m\ntrain\na<b",),
}


def words(text: str) -> str:
    """What is read, with `|` between elements."""
    return re.sub(r"(\|\s*)+", "|", html.unescape(re.sub(r"<[^>]*>", "|", text)))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[..., Path]) -> str:
    run_dir = make_run(tmp_path_factory.mktemp("parts"))
    choice = Choice(key="rollout.scheme", value="int8", why="this processor has VNNI")
    read_plan(run_dir / "plan.json").replace(choices=(choice,)).write(run_dir / "plan.json")
    append_event(
        run_dir, kind="note", what="memory: 2.0 GiB are missing; close other programs", why="preflight", time=96.0
    )
    return page(read_view(run_dir), now=1000.0)


def test_the_page_has_these_figures_and_no_others(text: str) -> None:
    found = [words(each).split("|") for each in re.findall(r"<figure.*?</figure>", text, flags=re.DOTALL)]
    assert [next(part for part in parts if part in FIGURES) for parts in found] == list(FIGURES)


@pytest.mark.parametrize("title", FIGURES)
def test_a_figure_has_its_numbers_and_bounds(text: str, title: str) -> None:
    found = (words(each) for each in re.findall(r"<figure.*?</figure>", text, flags=re.DOTALL))
    (figure,) = (each for each in found if title in each.split("|"))
    assert [each for each in FIGURES[title] if each not in figure] == []


@pytest.mark.parametrize("title", DETAILS)
def test_what_ran_is_on_the_page(text: str, title: str) -> None:
    _, _, after = words(text.partition("<h2>What ran</h2>")[2]).partition(f"|{title}|")
    (place,) = (number for number, each in enumerate(DETAILS) if each == title)
    following = list(DETAILS)[place + 1 : place + 2]
    part = after.partition(f"|{following[0]}|")[0] if following else after
    assert [each for each in DETAILS[title] if each not in part] == []


def test_answers_are_there_for_each_validation(text: str) -> None:
    said = words(text.partition("<h2>What the model said</h2>")[2].partition("<h2>")[0])
    validation, _, training = said.partition("|Training: one prompt of a step, its best and its worst sample|")
    assert "step 0: reward |0|, 3 tokens|12|" in validation and "step 10: reward |1|, 3 tokens|46|" in validation
    assert "step 10: reward |1|, 3 tokens|46|" in training

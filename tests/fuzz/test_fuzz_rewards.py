"""Rewards: any response, truth and row gives a finite number, or an error in words that costs one sample.

What a hostile *function* does, such as one that never ends, is in `test_preflight_own_rewards` and `test_reward_pool`.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from fuzz_surface import attempt, fuzzed
from fuzz_text import VARIANTS, as_json, seeds, values, variants, wild_text
from hypothesis import strategies as st
from plans import make_own_task

from appliance.errors import RecipeError
from appliance.finding import fault
from appliance.tasks import own_task
from appliance.tasks.answers import marked_answer
from appliance.tasks.grading import weigh_rewards
from appliance.tasks.rewards import BUILT_IN
from appliance.tasks.rows import Problem
from appliance.tasks.task import Response
from appliance.tasks.user_code import load_function

NAMES = ("math", "number", "exact", "choice", "format", "length", "regex")
PARTS = ("<think>", "</think>", "<answer>", "</answer>", "\\boxed{", "}", "#### ", "Answer: ", "(C)", "-$1,234.5", "12")
PIECES = (*PARTS, ".5", "9" * 5000, "####" * 500, "\\boxed{" * 500, "<think>" * 500, "1," * 2000, " " * 2000, "\n")
responses = st.lists(st.one_of(st.sampled_from(PIECES), wild_text), max_size=5).map("".join)
truths = st.one_of(st.sampled_from(("7", "C", "#### 1,234", "\\boxed{x}", "")), wild_text)
COLUMNS = ("completions", "self", "reward_model", "data_source", "extra_info")
FORMS = """
def ours(response, truth, *, row): return len(response) + len(row)
def trls(prompts, completions, completion_ids, **columns): return [float(len(prompts) + len(columns))]
def verls(data_source, solution_str, ground_truth, extra_info): return {"score": len(solution_str)}
"""


def judged(value: Any, text: str, truth: str, row: str = "") -> None:
    try:
        reward = value(Response(text, truth, row))
    except ValueError as error:  # of one sample
        raise RecipeError([fault((), str(error))]) from error
    graded = weigh_rewards([("it", 1.0, reward)])
    assert graded.fault is None and math.isfinite(graded.accuracy)


@fuzzed("rewards", variants=VARIANTS, seed=seeds, text=responses, truth=truths, name=st.sampled_from(NAMES))
def test_fuzz_built_in_rewards(room: Path, text: str, truth: str, name: str, seed: int) -> None:
    options = {"length": {"target": 9}, "regex": {"pattern": r"(\d+) cm"}}.get(name, {})
    value = functools.partial(BUILT_IN[name].grade, **options)
    for variant in variants(text.encode(errors="replace"), seed):
        response = variant.decode(errors="replace")
        marked_answer(response)
        attempt("rewards", lambda response=response: judged(value, response, truth), folder=room)


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    file = tmp_path_factory.mktemp("code") / "rewards.py"
    file.write_text(FORMS)
    given = functools.partial(own_task.prompt_and_truth, settings=make_own_task())
    return [load_function(str(file), name, parts_of_row=given) for name in ("ours", "trls", "verls")]


@fuzzed(
    "rows of rewards",
    text=wild_text,
    row=st.dictionaries(
        st.one_of(st.sampled_from(("prompt", "completions", "self", "reward_model")), wild_text), values
    ),
    prompt=st.one_of(wild_text, st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": wild_text}))),
)
def test_fuzz_rows_of_functions(room: Path, forms: list[Any], text: str, row: dict[str, Any], prompt: Any) -> None:
    def ask() -> None:
        problem = own_task.parse_row(json.loads(as_json({**row, "prompt": prompt})), settings=make_own_task())
        if isinstance(problem, Problem):
            for value in forms:
                judged(value, text, problem.truth, problem.row)

    attempt("rows of rewards", ask, folder=room)

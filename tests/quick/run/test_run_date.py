"""The day that a chat template is told: in the plan, in the problems' key, after a resume on another day."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from plans import HOST
from stopped_runs import save, stopped

from appliance.launch.resume import find_target, original_plan
from appliance.plan.build import OriginalPlan, build_plan
from appliance.preflight.probes import read_host
from appliance.recipe.load import load_recipe, to_yaml
from appliance.recipe.schema import Recipe
from appliance.record.plan import RunPlan

TODAY, TOMORROW = "2026-11-28", "2026-11-29"
ASKS, DOES_NOT_ASK = "{{ strftime_now('%d %b %Y') }}{{ messages }}", "{{ messages }}"
WHY = "the chat template asks for it: the day on which the run began, in all of its prompts"


def recipe(model: str) -> Recipe:
    return load_recipe("arithmetic-tiny-int8", sets=("model.builtin=null", f"model.path={model}"))


def planned(model: str, run_dir: Path, *, today: str = TODAY, **given: object) -> RunPlan:
    host = dataclasses.replace(HOST, today=today)
    return build_plan(recipe(model), run_dir=run_dir, host=host, **given)


def model_in(folder: Path, *, place: str, template: str) -> str:
    """A folder with a chat template in one of the places where transformers reads it."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    templates = [{"name": "default", "template": template}]
    match place:
        case "tokenizer_config.json":
            (folder / place).write_text(json.dumps({"chat_template": template}))
        case "several in tokenizer_config.json":
            (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
        case _:
            (folder / place).parent.mkdir(exist_ok=True)
            (folder / place).write_text(template)
    return str(folder)


@pytest.mark.parametrize(
    "place",
    [
        *("chat_template.jinja", "additional_chat_templates/default.jinja", "tokenizer_config.json"),
        "several in tokenizer_config.json",
    ],
)
def test_a_plan_has_the_day_where_the_template_asks(place: str, tmp_path: Path) -> None:
    asks = planned(model_in(tmp_path / "asks", place=place, template=ASKS), tmp_path / "run")
    assert asks.task_files.date == TODAY
    assert [(each.value, each.why) for each in asks.choices if each.key == "task.date"] == [(TODAY, WHY)]
    others = planned(model_in(tmp_path / "other", place=place, template=DOES_NOT_ASK), tmp_path / "run")
    assert others.task_files.date == "" and not any(each.key == "task.date" for each in others.choices)


def test_a_model_that_is_not_here_yet_may_ask(tmp_path: Path) -> None:
    plan = planned("owner/a-model-that-is-nowhere", tmp_path / "run")
    assert plan.task_files.date == TODAY and not any(each.key == "task.date" for each in plan.choices)


def test_a_builtin_model_does_not_ask(tmp_path: Path) -> None:
    plan = build_plan(
        load_recipe("arithmetic-tiny-int8"), run_dir=tmp_path / "run", host=dataclasses.replace(HOST, today=TODAY)
    )
    assert plan.task_files.date == ""


def test_a_days_problems_have_a_key_of_their_own(tmp_path: Path) -> None:
    """Which prompts are too long depends on it."""
    model = model_in(tmp_path / "asks", place="chat_template.jinja", template=ASKS)
    keys = {planned(model, tmp_path / "run", today=day).task_files.train_parquet for day in (TODAY, TODAY, TOMORROW)}
    data = tmp_path / "rows.jsonl"
    data.write_text('{"question": "1 + 2?", "answer": "#### 3"}\n' * 3)
    read = load_recipe(
        "gsm8k-tiny-int8",
        sets=("model.builtin=null", f"model.path={model}", f"task.train_file={data}", "task.val_size=1"),
    )
    read_keys = {
        build_plan(read, run_dir=tmp_path / "run", host=dataclasses.replace(HOST, today=day)).task_files.train_parquet
        for day in (TODAY, TODAY, TOMORROW)
    }
    assert (len(keys), len(read_keys)) == (2, 2)


def test_a_resumed_run_keeps_the_day_on_which_it_began(tmp_path: Path) -> None:
    model = model_in(tmp_path / "asks", place="chat_template.jinja", template=ASKS)
    begun = planned(model, tmp_path / "small-1")
    run_dir = stopped(begun)
    (run_dir / "recipe.yaml").write_text(to_yaml(recipe(model)))
    save(run_dir, 3)
    target = find_target(str(run_dir), root=tmp_path, recipe_name="", name=None)
    assert target is not None
    again = planned(model, run_dir, today=TOMORROW, original=original_plan(target))
    assert again.task == begun.task and again.task_files.date == TODAY


def test_a_run_that_began_without_a_day_goes_on_without_one(tmp_path: Path) -> None:
    """One of an earlier version: with a day its problems would have another key."""
    model = model_in(tmp_path / "asks", place="chat_template.jinja", template=ASKS)
    original = OriginalPlan("cpu", None)
    plans = [planned(model, tmp_path / "run", today=day, original=original) for day in (TODAY, TOMORROW)]
    assert plans[0].task == plans[1].task and plans[0].task_files.date == ""


def test_the_host_says_the_day() -> None:
    assert len(read_host(Path.cwd()).today) == len(TODAY)

"""Several validations in a recipe: what they refuse, by place, and the plan that they make."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import HOST

from appliance.errors import RecipeError
from appliance.plan.build import build_plan
from appliance.recipe.load import load_recipe, to_yaml
from appliance.record.plan import RunPlan
from appliance.settings.sections import ValSet

OWN = """\
model: {builtin: tiny-arithmetic}
task:
  kind: own
  train_file: problems.jsonl
  prompt: question
  rewards: [{name: exact}, {name: exact, weight: 0.5}]
  max_prompt_tokens: 8
  max_response_tokens: 6
  val_sets:
    hard: {file: hard.jsonl, samples: 4}
    held_out: {size: 32}
trainer: {steps: 2}
cluster: {device: cpu}
"""
HINT = "remove one: a set has a file and a size of its own"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`r.yaml` in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(OWN)
    return tmp_path / "r.yaml"


def problems_of(*sets: str, recipe: str = "r.yaml") -> list[tuple[str, str]]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, sets=sets)
    return caught.value.problems


def planned(folder: Path, *sets: str) -> RunPlan:
    return build_plan(load_recipe("r.yaml", sets=sets), run_dir=folder / "runs" / "r-1", host=HOST)


def test_the_plan_has_the_sets_and_says_which_one_counts(recipe: Path) -> None:
    plan = planned(recipe.parent, "rollout.temperature=0.7")
    assert plan.task.val_sets == {
        "hard": ValSet(file=str(recipe.parent / "hard.jsonl"), samples=4, temperature=0.7),
        "held_out": ValSet(size=32, temperature=0.0),
    }
    (choice,) = [each for each in plan.choices if each.key == "task.val_sets"]
    assert (choice.value, choice.why) == (
        "hard",
        "the first one counts: checkpoint.keep_best, val_reward_mean and the summary go by its mean reward",
    )
    assert plan.task.data_files == tuple(str(recipe.parent / name) for name in ("problems.jsonl", "hard.jsonl"))
    assert list(plan.task.named_rewards) == ["exact", "exact-2"]


def test_what_changes_its_problems_makes_other_data_and_nothing_else_does(recipe: Path) -> None:
    def data(*sets: str) -> str:
        return planned(recipe.parent, *sets).task_files.val_parquet

    assert data() == data("task.val_sets.hard.samples=8", "task.val_sets.hard.temperature=0.5")
    others = [data(f"task.val_sets.{change}") for change in ("hard.size=3", "held_out.size=31", "more={file: a.jsonl}")]
    assert len({data(), *others}) == 4


def test_a_kept_recipe_reads_back_with_its_sets_in_their_order(recipe: Path) -> None:
    read = load_recipe("r.yaml")
    recipe.write_text(to_yaml(read))
    assert load_recipe("r.yaml").task == read.task and list(read.task.val_sets) == ["hard", "held_out"]


def test_an_empty_mapping_takes_inherited_sets_away(recipe: Path) -> None:
    assert load_recipe("r.yaml", sets=("task.val_sets={}", "task={}")).task.val_sets == {}
    ((message, hint),) = problems_of("task.val_sets=null")
    assert (message, hint) == (
        "--set task.val_sets=null: task.val_sets: expected a mapping of keys, got nothing",
        "its default is `{}`",
    )
    recipe.with_name("child.yaml").write_text("extends: r.yaml\ntask:\n  val_sets: {}\n  val_file: v.jsonl\n")
    assert load_recipe("child.yaml").task.val_file == "v.jsonl"
    recipe.with_name("parent.yaml").write_text("extends: r.yaml\nmodel:\n  lora:\n    rank: 4\n")
    recipe.with_name("child.yaml").write_text("extends: parent.yaml\nmodel:\n  lora: {}\n")
    assert load_recipe("child.yaml").model.lora == load_recipe("parent.yaml").model.lora


@pytest.mark.parametrize(
    ("sets", "problem"),
    [
        (("task.val_file=v.jsonl",), ("task.val_file: `val_file` and `val_sets` exclude each other", HINT)),
        (("task.val_size=64",), ("task.val_size: `val_size` and `val_sets` exclude each other", HINT)),
        (
            ("task.val_sets.more={size: 8}",),
            (
                "task.val_sets.more: `held_out`, `more` have no file: only one validation can be held out of the "
                "training data",
                "give the others a `file`",
            ),
        ),
        (
            ("task.val_sets.held_out.size=0",),
            (
                "task.val_sets.held_out.size: the number of problems to hold out of the training data is not given",
                "give `size`, or a `file`",
            ),
        ),
        (
            ("task.val_sets.hard.temperature=0",),
            (
                "task.val_sets.hard.samples: 4 samples at temperature 0 are all the same",
                "use 1 sample, or a temperature above 0",
            ),
        ),
        (("task.val_sets.hard.sample=4",), ("task.val_sets.hard.sample: unknown key", "did you mean `samples`?")),
        (
            ("task.rewards=[{name: exact, factor: 2}]",),
            (
                "task.rewards.0.factor: unknown key",
                "use one of `name`, `weight`, `pattern`, `target`, `url`, `model`, `prompt`",
            ),
        ),
        (
            ("task.val_sets={a/b: {size: 8}}",),
            (
                "task.val_sets.a/b: the text `a/b` is not a name",
                "use letters, digits, `.`, `_` and `-`, at most 80, no space or slash",
            ),
        ),
        (
            ("task.val_sets.hard.samples=0",),
            ("task.val_sets.hard.samples: must be at least 1, got `0`", ""),
        ),
    ],
)
def test_rule(recipe: Path, sets: tuple[str, ...], problem: tuple[str, str]) -> None:
    ((message, hint),) = problems_of(*sets)
    assert (message[message.rindex(": task.") + 2 :], hint) == problem


def test_a_built_in_task_makes_the_problems_of_its_one_set() -> None:
    found = problems_of("task.val_sets={a: {file: a.jsonl}, b: {size: 9000}}", recipe="arithmetic-tiny-int8")
    assert [message[message.index(": task.val_") + 2 :] for message, _ in found] == [
        "task.val_sets.a.file: `arithmetic` makes its own problems",
        "task.val_sets.b.size: 9000 is more than the 998 validation problems of difficulty 2",
    ]

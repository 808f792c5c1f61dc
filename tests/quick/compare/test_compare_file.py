"""A comparison's file: what it means, and everything that is wrong with one at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.compare.arms import plan_runs
from appliance.compare.file import FOLDER, load_comparison
from appliance.errors import RecipeError
from appliance.recipe import library

pytestmark = pytest.mark.usefixtures("no_sample")

TEXT = """\
recipe: arithmetic-tiny-int8
set:
  trainer.steps: 2
  correction.cap:
arms:
  bf16: [rollout.scheme=bf16]
  int8: {correction.method: none, trainer.steps: 3}
  plain:
seeds: [0, 7]
baseline: bf16
validation: 16
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes `c.yaml` in a folder of its own, which is the current one."""
    monkeypatch.chdir(tmp_path)

    def write_file(text: str, name: str = "c.yaml") -> str:
        (tmp_path / name).write_text(text)
        return name

    return write_file


def problems_of(name: str) -> list[tuple[str, str]]:
    with pytest.raises(RecipeError) as raised:
        plan_runs(load_comparison(name))
    assert raised.value.exit_code == 2
    return raised.value.problems


def test_arms_are_lists_or_mappings_over_what_all_share(write) -> None:
    found = load_comparison(write(TEXT))
    assert (found.name, found.seeds, found.baseline, found.validation, found.margin) == ("c", (0, 7), "bf16", 16, 0.03)
    assert {arm.name: arm.texts for arm in found.arms} == {
        "bf16": ("trainer.steps=2", "correction.cap=null", "rollout.scheme=bf16", "task.val_size=16"),
        "int8": ("trainer.steps=3", "correction.cap=null", "correction.method=none", "task.val_size=16"),
        "plain": ("trainer.steps=2", "correction.cap=null", "task.val_size=16"),
    }


def test_runs_are_planned_seed_by_seed_in_one_folder_with_the_cache_of_train(write, tmp_path: Path) -> None:
    runs = plan_runs(load_comparison(write(TEXT)))
    assert [run.run_dir.relative_to(tmp_path / "runs" / "c").name for run in runs] == [
        *("bf16-seed0", "int8-seed0", "plain-seed0"),
        *("bf16-seed7", "int8-seed7", "plain-seed7"),
    ]
    assert {run.plan.cache_dir for run in runs} == {str(tmp_path / "runs" / ".cache")}
    assert [run.plan.seed for run in runs] == [0, 0, 0, 7, 7, 7]
    assert [run.plan.trainer.steps for run in runs[:3]] == [2, 3, 2]
    assert {run.plan.task.val_size for run in runs} == {16}
    assert not (tmp_path / "runs").exists()


def test_everything_wrong_with_the_file_is_told_at_once(write) -> None:
    text = """\
recipe: arithmetic-tiny-int9
sett: {a: 1}
set: {seed: 3, trainer.steps: 2}
arms:
  bf16: {rollout.scheme: bf16, task.val_size: 3}
  in t8:
  x: 7
  y: [correction.method=tis, 4, foo]
seeds: [0, 0, -1]
baseline: bf17
validation: "2000"
margin: 0
"""
    assert problems_of(write(text)) == [
        (
            "c.yaml:1: recipe: arithmetic-tiny-int9: no shipped recipe has this name, and no file",
            "did you mean `arithmetic-tiny-int8`?",
        ),
        ("c.yaml:2: sett: unknown key", "did you mean `set`?"),
        ("c.yaml:3: set: `seed` cannot be set here", "set `seeds` instead"),
        ("c.yaml:5: arms.bf16: `task.val_size` cannot be set here", "set `validation` instead"),
        (
            "c.yaml:6: arms: the text `in t8` is not a name",
            "use letters, digits, `.`, `_` and `-`, at most 80 with the seed, no space or slash",
        ),
        (
            "c.yaml:7: arms.x: expected settings, got `7`",
            "such as `[rollout.scheme=bf16]`, or `{rollout.scheme: bf16}`",
        ),
        ("c.yaml:8: arms.y: expected KEY=VALUE, got `4`", "such as `rollout.scheme=bf16`"),
        ("c.yaml:8: arms.y: expected KEY=VALUE, got the text `foo`", "such as `rollout.scheme=bf16`"),
        ("c.yaml:9: seeds.2: must be at least 0, got `-1`", ""),
        ("c.yaml:9: seeds: a seed is named twice", "name each once"),
        ("c.yaml:10: baseline: no arm is called `bf17`", "did you mean `bf16`?"),
        ("c.yaml:11: validation: expected a whole number, got the text `2000`", "remove the quotes"),
        ("c.yaml:12: margin: must be greater than 0, got `0`", ""),
    ]


@pytest.mark.parametrize(
    ("settings", "key", "hint"),
    [
        ("{extends: arithmetic-tiny-bf16}", "extends", "write it into a recipe file"),
        ("{task: {val_size: 4}}", "task.val_size", "set `validation` instead"),
        ("{task: {val_sets: {}}}", "task.val_sets", "a comparison validates once, on `validation` problems"),
        ("[task.val_sets.a.size=4]", "task.val_sets", "a comparison validates once, on `validation` problems"),
        ("['task={val_size: 4}']", "task.val_size", "set `validation` instead"),
    ],
)
def test_what_is_given_elsewhere_cannot_be_set_in_whatever_form(write, settings: str, key: str, hint: str) -> None:
    text = TEXT.replace("[rollout.scheme=bf16]", settings)
    assert problems_of(write(text)) == [(f"c.yaml:6: arms.bf16: `{key}` cannot be set here", hint)]


def test_an_arm_may_be_compared_with_another_than_the_baseline(write) -> None:
    found = load_comparison(write(f"{TEXT}against: {{plain: int8}}\n"))
    assert found.against == {"plain": "int8"}


def test_what_an_arm_is_compared_with_must_be_another_arm(write) -> None:
    assert problems_of(write(f"{TEXT}against:\n  int8: int8\n  plane: bf16\n  bf16: plain\n")) == [
        ("c.yaml:13: against: `int8` cannot be compared with `int8`", "name another arm"),
        ("c.yaml:14: against: no arm is called `plane`", "did you mean `plain`?"),
        (
            "c.yaml:15: against: `bf16` cannot be compared with `plain`",
            "it is the arm that others are compared with: give another `baseline`",
        ),
    ]
    assert problems_of(write(f"{TEXT}against:\n  int8: plain\n  plain: int8\n")) == [
        (
            f"c.yaml:{line}: against: `{arm}` is compared with `{other}`, which has its own",
            "compare both with one arm: a chain of differences ends at no baseline",
        )
        for line, arm, other in ((13, "int8", "plain"), (14, "plain", "int8"))
    ]
    assert problems_of(write(f"{TEXT}against: {{plain: [int8]}}\n")) == [
        ("c.yaml:12: against.plain: expected text, got a list", "")
    ]


def test_missing_keys_are_named_with_an_example(write) -> None:
    assert problems_of(write("margin: 0.1\n")) == [
        ("c.yaml: recipe: the key is missing", "such as `recipe: arithmetic-tiny-int8`"),
        ("c.yaml: arms: the key is missing", "a mapping of names to settings, such as `bf16: [rollout.scheme=bf16]`"),
        ("c.yaml: seeds: the key is missing", "such as `seeds: [0, 1, 2]`"),
        ("c.yaml: baseline: the key is missing", "the arm that the others are compared with"),
    ]


def test_problems_of_all_arms_come_once_with_their_lines(write) -> None:
    text = TEXT.replace("[rollout.scheme=bf16]", "{correction.cap: abc}").replace("plain:", "plain: [corection.cap=2]")
    assert problems_of(write(text.replace("validation: 16", "validation: 5000"))) == [
        ("c.yaml:6: correction.cap: expected a number, got the text `abc`", ""),
        ("c.yaml:8: corection: unknown key", "did you mean `correction`?"),
        (
            "c.yaml:11: task.val_size: 5000 is more than the 998 validation problems of difficulty 2",
            "lower it, or lower task.train_size to leave more for validation; or raise task.difficulty",
        ),
    ]


def test_arms_that_validate_on_other_problems_are_refused(write) -> None:
    text = TEXT.replace("[rollout.scheme=bf16]", "[task.train_size=64]")
    hint = "`task` and the model's tokenizer must be as in the arm `bf16` (arithmetic)"
    assert problems_of(write(text)) == [
        ("c.yaml:7: arms.int8: it validates on other problems", hint),
        ("c.yaml:8: arms.plain: it validates on other problems", hint),
    ]


def test_a_comparison_that_is_not_there(write) -> None:
    shipped = ", ".join(sorted(path.stem for path in (library.folder().parent / FOLDER).glob("*.yaml")))
    assert problems_of("nothing") == [
        ("nothing: no such comparison", f"give a file, or one of the shipped: {shipped}"),
    ]
    long = "a" * 300  # no file can have this name
    assert problems_of(long) == [(f"{long}: no such comparison", f"give a file, or one of the shipped: {shipped}")]


def test_the_example_of_the_page_can_be_planned(write) -> None:
    page = library.folder().parent / "docs" / "experiments.md"
    example = page.read_text().partition("```yaml\n")[2].partition("```")[0]
    assert len(plan_runs(load_comparison(write(example)))) == 6


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((library.folder().parent / FOLDER).glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_comparisons_can_be_planned(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = load_comparison(path.stem)
    assert found.validation >= (998 if path.stem == "flow-long" else 2000)  # all that its training leaves
    assert len(plan_runs(found)) == len(found.arms) * len(found.seeds)

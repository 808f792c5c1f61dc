"""What a recipe may ask of the guard in this version."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.errors import RecipeError
from appliance.recipe.load import load_recipe

RECIPE = "extends: arithmetic-tiny-int8\nguard:\n  "


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("actions: [warm]", ("guard.actions.0: unknown value `warm`", "did you mean `warn`?")),
        ("save_budget_s: 0", ("guard.save_budget_s: must be greater than 0, got `0`", "")),
        ("bad_steps: 0", ("guard.bad_steps: must be at least 1, got `0`", "")),
        ("k3_kl: .nan", ("guard.k3_kl: not a finite number: `.nan`", "")),
    ],
)
def test_what_the_guard_cannot_do_is_a_recipe_error(tmp_path: Path, line: str, problem: tuple[str, str]) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE + line + "\n")
    with pytest.raises(RecipeError) as raised:
        load_recipe(str(path))
    ((message, hint),) = raised.value.problems
    assert message.removeprefix(f"{path}:3: ") == problem[0]
    assert hint.startswith(problem[1])


def test_no_actions_at_all_is_a_choice(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE + "actions: []\n")
    assert load_recipe(str(path)).guard.actions == ()


@pytest.mark.parametrize(
    ("sets", "problem", "hint"),
    [
        (
            ("rollout.scheme=bf16", "guard.actions=[warn, raise-precision]"),
            "guard.actions: rollouts in BF16 have no precision to raise",
            "remove `raise-precision`",
        ),
        (
            (
                "rollout.scheme=auto",
                "rollout.replicas=[int8, fp8]",
                "guard.actions=[raise-precision]",
                "cluster.gpus_per_node=2",
            ),
            "guard.actions: `raise-precision` cannot say which of several quantised schemes to raise",
            "remove it (`bf16` works for all), or use one scheme beside bf16",
        ),
        (
            ("trainer.validate_bf16_every=15",),
            "trainer.validate_bf16_every: there is no validation every 15 steps",
            "use a multiple of validate_every (10)",
        ),
        (
            ("trainer.validate_bf16_every=10", "trainer.validate_every=0"),
            "trainer.validate_bf16_every: there is no validation every 10 steps",
            "set validate_every, or null for the end",
        ),
    ],
)
def test_what_cannot_go_together_is_a_recipe_error(sets: tuple[str, ...], problem: str, hint: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load_recipe("arithmetic-tiny-int8", sets=sets)
    assert [(message.partition(": ")[2], said) for message, said in raised.value.problems] == [(problem, hint)]


def test_every_action_may_be_asked_for() -> None:
    sets = ("guard.actions=[warn, tighten, raise-precision, bf16, stop]", "trainer.validate_bf16_every=20")
    assert len(load_recipe("arithmetic-tiny-int8", sets=sets).guard.actions) == 5

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
        (
            "actions: [warn, bf16]",
            ("guard.actions: `bf16` is not available in this version", "use one of `warn`, `stop`"),
        ),
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

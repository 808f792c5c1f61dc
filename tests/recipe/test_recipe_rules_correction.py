"""Corrections that cannot be are refused with their place, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.errors import RecipeError
from appliance.recipe.load import load_recipe

RECIPE = "extends: arithmetic-tiny-int8\n"
UAQ_HINT = "give one such as 1.5, or null"


def problems_of(path: Path, text: str, *sets: str) -> list[tuple[str, str]]:
    path.write_text(RECIPE + text)
    with pytest.raises(RecipeError) as raised:
        load_recipe(str(path), sets=sets)
    return raised.value.problems


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("cap: 0", ("correction.cap: must be greater than 0, got `0`", "")),
        ("cap: -2", ("correction.cap: must be greater than 0, got `-2`", "")),
        ("cap: .inf", ("correction.cap: not a finite number: `.inf`", "")),
        ("uaq_scale: 1", ("correction.uaq_scale: 1 scales nothing", UAQ_HINT)),
        ("uaq_scale: 0", ("correction.uaq_scale: must be greater than 0, got `0`", "")),
        (
            "uaq_scale: 1e9",
            ("correction.uaq_scale: 1e+09 does not lie between 0.000244141 and 4096", UAQ_HINT),
        ),
    ],
)
def test_a_correction_that_cannot_be(tmp_path: Path, line: str, problem: tuple[str, str]) -> None:
    path = tmp_path / "r.yaml"
    place = f"{path}:{3}: "
    assert problems_of(path, f"correction:\n  {line}\n") == [(place + problem[0], problem[1])]


def test_a_cap_that_is_no_number_has_its_place(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path / "r.yaml", "", "correction.cap=abc")
    assert problem == ("--set correction.cap=abc: correction.cap: expected a number, got the text `abc`", "")

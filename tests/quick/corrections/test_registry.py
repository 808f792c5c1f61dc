"""The closed set of methods, and that people read of it what it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from appliance.corrections.registry import DEFAULT, METHODS, CorrectionMethod, correction_of
from appliance.errors import RecipeError
from appliance.recipe.load import load_recipe

DOCS = Path(__file__).parents[3] / "docs" / "corrections.md"


def table() -> list[str]:
    rows = ["| `correction.method` | what is compared | with | what happens |", "| --- | --- | --- | --- |"]
    for name, method in METHODS.items():
        limit = ""
        if method.usual_cap is not None:
            limit = f"`cap`, {method.usual_cap:g}"
        elif method.usual_bounds is not None:
            limit = f"`bounds`, [{method.usual_bounds[0]:g}, {method.usual_bounds[1]:g}]"
        cells = (f"`{name}`{' (default)' if name == DEFAULT else ''}", method.compared, limit, method.effect)
        rows.append("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|")
    return rows


def test_the_page_has_the_table_of_the_methods() -> None:
    assert [line for line in DOCS.read_text().splitlines() if line.startswith("| ")][: len(table())] == table(), (
        "docs/corrections.md is to have this table:\n" + "\n".join(table())
    )


def test_the_governors_page_says_of_each_method_how_it_is_tightened() -> None:
    section = DOCS.with_name("governor.md").read_text().partition("## Tightening")[2].partition("\n## ")[0]
    first_cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    named = {name for cell in first_cells for name in re.findall(r"`([\w-]+)`", cell)}
    masks = {name for name in METHODS if name.endswith("-mask")}  # `the masks`, in one row
    assert sorted(METHODS.keys() - masks - named) == []


def test_an_unknown_method_gets_the_list_of_all() -> None:
    with pytest.raises(RecipeError) as raised:
        load_recipe("arithmetic-tiny-int8", sets=["correction.method=tos"])
    ((message, hint),) = raised.value.problems
    assert message.endswith("correction.method: unknown value `tos`")
    assert all(f"`{method}`" in hint for method in CorrectionMethod)


@pytest.mark.parametrize("name", METHODS)
def test_usual_limits_have_a_source_and_hold_where_none_is_given(name: str) -> None:
    usual = METHODS[name]
    correction = correction_of(name)
    assert (correction.name, correction.cap, correction.bounds) == (name, usual.usual_cap, usual.usual_bounds)
    assert bool(usual.source) == (usual.usual_cap is not None or usual.usual_bounds is not None)
    assert usual.usual_cap is None or usual.usual_bounds is None
    assert list(usual.refusals(cap=usual.usual_cap, bounds=usual.usual_bounds, clip=correction.clip)) == []
    assert name in correction.text or name == "none"

"""Recipes and `--set`: whatever is in a file, it is a recipe that can be written and read again, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fuzz_surface import attempt, fuzzed
from fuzz_text import (
    BOMBS,
    ROOT,
    VARIANTS,
    as_json,
    broken,
    raw,
    scalars,
    seeds,
    tokens_of,
    values,
    variants,
    wild_text,
)
from hypothesis import strategies as st

from appliance.errors import RecipeError
from appliance.recipe.load import load_recipe, to_plain, to_yaml
from appliance.recipe.schema import SECTIONS, Recipe

SHIPPED = [file.read_text() for file in sorted((ROOT / "recipes").glob("*.yaml")) if file.stem != "reference"]
KEYS = [*Recipe.model_fields, *(f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields)]
WORDS = sorted(
    {word for key in KEYS for word in key.split(".")} | {"bf16", "int8", "auto", "gsm8k", "tis", "acr", "dapo"}
)
BASE: dict[str, Any] = {
    "model": {"builtin": "tiny-arithmetic"},
    "task": {"max_prompt_tokens": 16, "max_response_tokens": 8},
    "trainer": {"steps": 2},
}


def load(file: Path, *, sets: tuple[str, ...] = ()) -> Recipe:
    """A recipe that was taken is the same one after it was written and read; every problem of another has a place."""
    try:
        recipe = load_recipe(str(file), sets=sets)
    except RecipeError as error:
        assert error.problems, "refused without a problem"
        places = (str(file), "--set", str(ROOT / "recipes"), "/etc/passwd:1")  # the last is extended by some
        assert all(message.startswith(places) for message, _ in error.problems)
        raise
    file.with_name("again.yaml").write_text(to_yaml(recipe))
    assert to_plain(load_recipe(str(file.with_name("again.yaml")))) == to_plain(recipe)
    return recipe


@st.composite
def some_values(draw: st.DrawFn) -> dict[str, Any]:
    """A good recipe with wild values under legal keys, or a few keys of its own."""
    tree = {key: dict(section) for key, section in BASE.items()}
    for key in draw(st.lists(st.sampled_from(KEYS), max_size=4)):
        section, _, name = key.rpartition(".")
        level = tree.setdefault(section, {}) if section else tree
        if isinstance(level, dict):
            level[name] = draw(values)
    if draw(st.booleans()):
        tree[draw(wild_text)] = draw(values)
    return tree


@fuzzed("recipe bytes", variants=VARIANTS, seed=seeds, content=raw)
def test_fuzz_recipe_bytes(room: Path, content: bytes, seed: int) -> None:
    for each in variants(content, seed):
        (room / "recipe.yaml").write_bytes(each)
        attempt("recipe bytes", lambda: load(room / "recipe.yaml"), folder=room)


@fuzzed("recipe text", variants=VARIANTS, seed=seeds, content=st.one_of(broken(SHIPPED), tokens_of(WORDS)))
def test_fuzz_recipe_text(room: Path, content: bytes, seed: int) -> None:
    for each in variants(content, seed):
        (room / "recipe.yaml").write_bytes(each)
        attempt("recipe text", lambda: load(room / "recipe.yaml"), folder=room)


@fuzzed("recipe values", tree=some_values())
def test_fuzz_recipe_values(room: Path, tree: dict[str, Any]) -> None:
    (room / "recipe.yaml").write_text(as_json(tree))
    attempt("recipe values", lambda: load(room / "recipe.yaml"), folder=room)


options = st.one_of(
    st.tuples(st.sampled_from(KEYS), st.one_of(scalars.map(str), values.map(as_json), wild_text)).map("=".join),
    st.tuples(wild_text, st.sampled_from(["=", "", "=="]), wild_text).map("".join),
    st.text(max_size=40),
    st.integers(1, 600).map(lambda levels: "a." * levels + "b=1"),
)


@fuzzed("--set", sets=st.lists(options, min_size=1, max_size=3))
def test_fuzz_set(room: Path, sets: list[str]) -> None:
    (room / "recipe.yaml").write_text(as_json(BASE))
    attempt("--set", lambda: load(room / "recipe.yaml", sets=tuple(sets)), folder=room)


@pytest.mark.parametrize("number", range(len(BOMBS)))
def test_a_bomb_is_refused_at_once(room: Path, number: int) -> None:
    (room / "recipe.yaml").write_text(BOMBS[number])
    assert attempt("recipe text", lambda: load(room / "recipe.yaml"), folder=room) is None
    sets = (f"task={BOMBS[number]}",)
    attempt("--set", lambda: load_recipe("arithmetic-tiny-int8", sets=sets), folder=room)

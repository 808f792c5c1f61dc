"""Rules over the texts of a recipe: see `recipe.text`."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.recipe.broken import Broken
from appliance.recipe.schema import Recipe
from appliance.recipe.text import path_problem, pattern_problem

PATHS = (
    *("model.path", "task.train_file", "task.val_file", "quantization.profile"),
    *("cluster.run_dir", "cluster.token_file"),
)


def text_rules(recipe: Recipe) -> Iterator[Broken]:
    for key in PATHS:
        section, _, name = key.partition(".")
        value = getattr(getattr(recipe, section), name)
        if value and (why := path_problem(value)):
            yield Broken((key,), why, "correct the path")
    for rule in recipe.quantization.ignore:
        if rule.startswith("re:") and (why := pattern_problem(rule[3:])):
            message = f"`{rule[:60]}` is not a regular expression: {why}"
            yield Broken(("quantization.ignore",), message, "correct it")

"""A Recipe as YAML that `load_recipe` reads back to the same Recipe: what a run keeps as its `recipe.yaml`."""

from __future__ import annotations

from typing import Any

import yaml

from appliance.recipe.schema import CorrectionMethod, Recipe


def to_plain(recipe: Recipe) -> dict[str, Any]:
    """JSON values, every key written out, in the order of the schema."""
    plain = recipe.model_dump(mode="json", exclude={"extends"})
    if recipe.correction.method is CorrectionMethod.NONE:
        plain["correction"]["cap"] = None  # the default belongs to `tis`; written out beside `none` it is refused
    return plain


def to_yaml(recipe: Recipe) -> str:
    return yaml.safe_dump(to_plain(recipe), sort_keys=False, allow_unicode=True, width=120)

"""A Recipe as YAML that `load_recipe` reads back to the same Recipe: what a run keeps as its `recipe.yaml`."""

from __future__ import annotations

from typing import Any

import yaml

from appliance.corrections.registry import correction_of
from appliance.recipe.schema import Recipe


def to_plain(recipe: Recipe) -> dict[str, Any]:
    """JSON values, every key written out, in the order of the schema. The correction's usual limits become values.

    Without a profile to make, what it would be made by is left out: no value of it would be true.
    """
    plain = recipe.model_dump(mode="json", exclude={"extends"})
    correction = recipe.correction
    hold = correction_of(correction.method, cap=correction.cap, bounds=correction.bounds)
    plain["correction"] |= {"cap": hold.cap, "bounds": list(hold.bounds) if hold.bounds else None}
    if recipe.quantization.profile != "auto":
        for key in ("smoothing", "error_budget"):
            del plain["quantization"][key]
    return plain


def to_yaml(recipe: Recipe) -> str:
    return yaml.safe_dump(to_plain(recipe), sort_keys=False, allow_unicode=True, width=120)

"""A setting is a field once: a plan has the recipe's sections, and no field of a recipe's name that says the same."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType

from pydantic import BaseModel

from appliance.recipe import schema
from appliance.record import plan
from appliance.settings import sections
from appliance.settings.sections import Section
from appliance.terms import settings

ANOTHER_THING = {
    "CodeFile.path": "of a Python file of the user's, not of the model",
    "ExpectedAttestation.rank": "number of a process, not width of an adapter",
    "ExpectedAttestation.scheme": "scheme of one process",
    "ProfilePlan.scheme": "scheme of the engines that use the profile, by which it is made",
    "Quantisation.ignore": "what one engine gets: nothing in BF16",
    "Quantisation.lm_head_fp32": "what one engine gets",
    "Quantisation.profile": "folder in the run's own, empty for an engine that uses none",
    "Quantisation.scheme": "scheme of one engine",
    "RunPlan.name": "name of the run: the recipe's, with a number",
    "RunPlan.profile": "where the profile of the run is and what it is copied from",
    "RunPlan.run_dir": "folder of one run, which is in cluster.run_dir",
    "RunPlan.seed": "beside the sections in a recipe, too, and the same",
}
"""Fields of a plan that have the name of a recipe's key, each with the reason why it is another thing."""


def models_of(module: ModuleType) -> Iterator[type[BaseModel]]:
    for model in vars(module).values():
        if inspect.isclass(model) and issubclass(model, BaseModel) and model.__module__ == module.__name__:
            yield model


def test_a_setting_is_one_field() -> None:
    keys = {
        key
        for module in (schema, sections)
        for section in models_of(module)
        if issubclass(section, Section)
        for key in section.model_fields
    }
    twice = {
        f"{model.__name__}.{name}"
        for module in (plan, settings)
        for model in models_of(module)
        for name, field in model.model_fields.items()
        if name in keys and not (inspect.isclass(field.annotation) and issubclass(field.annotation, Section))
    }
    assert twice == set(ANOTHER_THING)

"""`recipes/reference.yaml` is what the schema makes of itself."""

import ast
from pathlib import Path

import appliance
from appliance.recipe import library
from appliance.recipe.load import load_recipe
from appliance.recipe.schema import EXAMPLES, SECTIONS, Recipe, reference
from appliance.settings.sections import Reward, ValSet
from appliance.tasks.rewards import BUILT_IN

PROMISED_SECTIONS = {"model", "task", "rollout", "quantization", "correction", "algorithm", "optimizer", "batch"} | {
    "trainer",
    "cluster",
    "guard",
    "checkpoint",
    "logging",
}


def test_the_file_is_the_schema_s():
    assert library.text("reference") == reference(), "python -m appliance.recipe.schema >recipes/reference.yaml"


def test_the_file_reads_back_as_the_defaults():
    loaded = load_recipe("reference")
    for section, model in SECTIONS.items():
        for name, field in model.model_fields.items():
            if f"{section}.{name}" not in EXAMPLES:
                assert getattr(getattr(loaded, section), name) == field.default, f"{section}.{name}"
    assert (loaded.name, loaded.extends, loaded.seed) == ("reference", None, 0)
    assert (loaded.model.builtin, loaded.trainer.steps) == ("tiny-arithmetic", 40)


def test_every_key_says_what_it_means():
    keys = {name: field for name, field in Recipe.model_fields.items() if name not in SECTIONS}
    keys |= {f"{each}.{name}": field for each, kind in SECTIONS.items() for name, field in kind.model_fields.items()}
    assert [name for name, field in keys.items() if not field.description] == []


def test_every_key_is_read_where_it_acts():
    """By its name, outside of the recipe's own code: one that no code reads has no effect, as one that verl must know
    and that has no line in plan/verl_args.py."""
    package = Path(appliance.__file__).parent
    read = {option for built_in in BUILT_IN.values() for option in built_in.options}
    for file in package.rglob("*.py"):
        if file.parent.name != "recipe" and file.name != "earlier_plans.py":
            read |= {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
    sections = {**SECTIONS, "task.rewards": Reward, "task.val_sets": ValSet}
    keys = {f"{section}.{name}": name for section, model in sections.items() for name in model.model_fields}
    assert [key for key, name in keys.items() if name not in read] == []


def test_every_promised_section_is_there():
    assert set(SECTIONS) == PROMISED_SECTIONS
